use proptest::prelude::*;

use super::*;

const CLAIMS: [Claim; 5] = [
    Claim::None,
    Claim::Mentioned,
    Claim::Allowed,
    Claim::ToBeDenied,
    Claim::Denied,
];

fn name(text: &str) -> DomainName {
    text.parse().expect("a name")
}

/// What a claim and one of two sets of rules come to. No name stands for one that no rule mentions.
fn standing(claim: Claim, rules: usize) -> Standing {
    let of_rules = name(["a.test", "b.test"][rules]);
    let alike = AlikeNames::of(&of_rules, |suffix| suffix == of_rules.wire());
    Standing {
        claim,
        alike: alike.filter(|_| claim != Claim::None),
    }
}

proptest! {
    #[test]
    fn who_gives_way_is_decided_by_the_rules_that_match(
        names in proptest::collection::vec((0..CLAIMS.len(), 0..2_usize, 0..3_u64), 1..7),
        further in (1..CLAIMS.len(), 0..2_usize),
    ) {
        let of = |(claim, rules): (usize, usize)| standing(CLAIMS[claim], rules);
        let further = of(further);
        let names: BTreeMap<DomainName, (Standing, u64)> = names
            .iter()
            .enumerate()
            .map(|(at, (claim, rules, end))| (name(&format!("n{at}")), (of((*claim, *rules)), *end)))
            .collect();
        let all = names.iter().map(|(name, (standing, _))| (name.clone(), standing.clone()));
        let by_rules = ByRules::new(Some(0), all);
        let mut changed = ByRules::new(Some(0), std::iter::empty());
        let gone = name("gone.test");
        changed.add(gone.clone(), further.clone());
        for (name, (standing, _)) in &names {
            changed.add(name.clone(), standing.clone());
        }
        changed.remove(&gone);
        prop_assert_eq!(&changed.names, &by_rules.names);
        prop_assert_eq!(changed.any_alike, by_rules.any_alike);
        let end = |name: &DomainName| names.get(name).map(|(_, end)| Timestamp::from_nanos(*end));
        let first = by_rules.first_to_go(&further, end);
        let at_address = by_rules.at_address(&further);
        let is_denied = further.claim >= Claim::ToBeDenied;
        match &at_address {
            AtAddress::Alike(alike) => {
                prop_assert_eq!(&names[alike].0, &further);
                return Ok(());
            }
            AtAddress::GivesWay => prop_assert!(first.is_some()),
            AtAddress::Room => prop_assert!(first.is_none() && is_denied),
            AtAddress::Full => prop_assert!(first.is_none() && !is_denied),
        }
        let others = |standing: &Standing| names.values().filter(|(of, _)| of == standing).count();
        let claims = || names.values().map(|(of, _)| of.claim);
        let least = claims().min().expect("there are names");
        let any_alike = names.values().any(|(of, _)| of.alike.is_some() && others(of) > 1);
        let goes_first = least < further.claim && least < Claim::Allowed;
        let goes_last = is_denied && least == Claim::Allowed;
        prop_assert_eq!(first.is_some(), goes_first || any_alike || goes_last);
        let Some((first, alike)) = first else {
            return Ok(());
        };
        let (of_first, first_end) = &names[&first];
        if let Some(alike) = &alike {
            // One of the rules stays, and it is the one that ends last.
            prop_assert!(!goes_first && *alike != first);
            prop_assert_eq!(&names[alike].0, of_first);
            prop_assert!(names.values().all(|(of, _)| of.alike.is_none() || others(of) <= others(of_first)));
            let ends = || names.values().filter(|(of, _)| of == of_first).map(|(_, end)| *end);
            prop_assert_eq!(ends().max(), Some(names[alike].1));
            prop_assert_eq!(ends().min(), Some(*first_end));
        } else {
            prop_assert!(of_first.claim < Claim::ToBeDenied);
            prop_assert!(goes_first || !any_alike);
            prop_assert_eq!(of_first.claim, least);
            let ends = names.values().filter(|(of, _)| of.claim == least).map(|(_, end)| *end);
            prop_assert_eq!(ends.min(), Some(*first_end));
        }
    }
}
