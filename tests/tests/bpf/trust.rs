//! Whose answers count, and to what.
