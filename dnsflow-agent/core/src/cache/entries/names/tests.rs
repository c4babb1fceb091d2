use super::*;

fn name(text: &str) -> DomainName {
    text.parse().expect("a name")
}

fn term(until: u64) -> Term {
    Term {
        until: Timestamp::from_nanos(until),
        deny_until: Timestamp::from_nanos(until + 100),
        is_denied: false,
        is_ended: false,
        origin: Origin::Answer,
        server: None,
    }
}

impl Names {
    /// Checks that what is known of the names agrees with them.
    pub(in crate::cache::entries) fn check(&self) {
        let denied = self.iter().filter(|(_, term)| term.is_denied);
        assert_eq!(self.denied(), denied.count());
        let any_ended = self.iter().any(|(_, term)| term.is_ended);
        assert_eq!(self.has_ended, any_ended);
        assert_eq!(self.several.is_some(), self.len() > 1);
        assert_eq!(self.last_end(), self.ends().max());
    }
}

#[test]
fn names_are_kept_once_and_in_order() {
    let mut names = Names::default();
    for (text, until) in [("b.test", 1), ("a.test", 2), ("c.test", 3), ("b.test", 4)] {
        names.insert(name(text), term(until));
    }
    let kept: Vec<_> = names
        .iter()
        .map(|(name, term)| (name.to_string(), *term))
        .collect();
    let wanted = [("a.test", 2), ("b.test", 4), ("c.test", 3)];
    assert_eq!(
        kept,
        wanted.map(|(text, until)| (text.to_owned(), term(until)))
    );
    names.remove(&name("b.test"));
    assert_eq!((names.len(), names.until(&name("b.test"))), (2, None));
}

#[test]
fn a_known_name_is_only_ever_prolonged() {
    let at = Timestamp::from_nanos;
    let mut names = Names::default();
    names.insert(name("a.test"), term(5));
    for (until, counts) in [(3, 5), (7, 7)] {
        assert!(names.prolong(&name("a.test"), term(until)));
        assert_eq!(names.until(&name("a.test")), Some(at(counts)));
    }
    assert!(!names.prolong(&name("b.test"), term(9)));
    assert_eq!(names.until(&name("b.test")), None);
}

#[test]
fn a_name_that_is_denied_counts_for_longer() {
    let mut names = Names::default();
    names.insert(name("a.test"), term(5));
    names.insert(name("b.test"), term(5));
    names.deny(
        |denied, _| *denied == name("a.test"),
        Timestamp::default(),
        |_| {},
    );
    let until = |names: &Names, text: &str| names.until(&name(text)).expect("it is known");
    assert_eq!(until(&names, "a.test"), term(5).deny_until);
    assert_eq!(until(&names, "b.test"), term(5).until);
    // An address in use may count for longer than that.
    names.insert(
        name("a.test"),
        Term {
            until: term(1000).until,
            ..term(5)
        },
    );
    names.deny(|_, _| true, Timestamp::default(), |_| {});
    assert_eq!(until(&names, "a.test"), term(1000).until);
}

#[test]
fn a_name_that_is_no_longer_denied_counts_as_long_as_its_answer() {
    let at = Timestamp::from_nanos;
    let denied = || {
        let mut names = Names::default();
        names.insert(name("a.test"), term(50));
        names.deny(|_, _| true, Timestamp::default(), |_| {});
        assert_eq!(names.until(&name("a.test")), Some(at(150)));
        names
    };
    // Until when it counts, if it counts until then at least.
    for (released, until) in [(20, 50), (70, 70), (200, 150)] {
        let mut names = denied();
        assert!(
            names.deny(|_, _| false, at(released), |_| {}),
            "it may end earlier"
        );
        assert_eq!(names.until(&name("a.test")), Some(at(until)), "{released}");
        assert!(!names.deny(|_, _| false, at(released), |_| {}), "once");
    }
}
