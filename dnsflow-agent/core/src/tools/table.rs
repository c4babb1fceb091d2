//! Hash tables that are looked up often. Strangers choose many of the keys: names, addresses. ahash has a key of its own
//! in each process, as the standard library's SipHash has, and takes a fraction of the time.

use ahash::RandomState;

/// In no order.
pub type HashMap<K, V> = std::collections::HashMap<K, V, RandomState>;

/// In the order in which the keys came.
pub type IndexMap<K, V> = indexmap::IndexMap<K, V, RandomState>;
