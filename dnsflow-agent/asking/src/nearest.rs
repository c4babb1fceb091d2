//! The word that somebody may have meant.

/// The known word that is nearest to this one, by the characters that are changed, added, left out or exchanged.
pub fn nearest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    known
        .into_iter()
        .min_by_key(|known| strsim::osa_distance(word, known))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_word_is_found() {
        let known = ["hold", "dry-run", "subdomains"];
        assert_eq!(nearest("dryrun", known), Some("dry-run"));
        assert_eq!(nearest("sub-domain", known), Some("subdomains"));
        assert_eq!(nearest("x", []), None);
    }
}
