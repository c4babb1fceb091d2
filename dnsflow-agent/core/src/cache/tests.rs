mod check;

use super::*;
use crate::{
    cache::journal::{Saved, SavedEntry, SavedName},
    policy::refused::Translation,
    switch::Switch,
    tools::deadline::Why,
};

fn name(text: &str) -> DomainName {
    text.parse().expect("a name")
}

const PORT: PortId = PortId(1);

fn at(seconds: u64) -> Timestamp {
    Timestamp::default() + Duration::from_secs(seconds)
}

/// A cache with one port, and the limits of one address each.
struct Setup {
    cache: Cache,
    switch: Switch,
    out: Output,
}

impl Setup {
    fn new(of_port: usize, of_name: usize) -> Self {
        let limits = CacheLimits {
            addresses_per_port_max: of_port,
            addresses_per_name_max: of_name,
            ..CacheLimits::default()
        };
        let mut cache = Cache::new(limits, None, Translation::default());
        assert_eq!(cache.open((PORT, SandboxId(1)), "ns1_p1", None), []);
        Self {
            cache,
            switch: Switch::new(
                Duration::ZERO,
                crate::values::limits::KEEP_FLOWS_S,
                Duration::ZERO,
            ),
            out: Output::default(),
        }
    }

    fn learn(&mut self, text: &str, host: u8, until: u64) -> Learned {
        let resolution = Resolution {
            port: PORT,
            address: [203, 0, 113, host].into(),
            name: &name(text),
            term: Term {
                until: at(until),
                deny_until: at(until),
                is_denied: false,
                is_ended: false,
                origin: Origin::Answer,
                server: None,
            },
            is_to_be_denied: false,
            standing: &OnceCell::new(),
        };
        let mut batch = self.switch.begin(at(0));
        let whose = |_| Some(("ns1".to_owned(), "ns1_p1".to_owned()));
        let learned = self.cache.learn(Learning {
            resolution,
            whose: &whose,
            standing: &|_, _| Standing {
                claim: Claim::Allowed,
                alike: None,
            },
            version: &|| None,
            batch: &mut batch,
            out: &mut self.out,
            replan: Vec::new(),
        });
        assert!(batch.is_empty(), "nothing is open");
        learned
    }

    fn expire(&mut self, seconds: u64) {
        let mut batch = self.switch.begin(at(seconds));
        self.cache.expire(&mut batch);
    }
}

#[test]
fn a_name_of_an_address_is_news_once_and_only_ever_prolonged() {
    let mut setup = Setup::new(9, 9);
    assert!(setup.learn("a.test", 1, 60).is_news);
    assert!(!setup.learn("a.test", 1, 90).is_news);
    assert!(!setup.learn("a.test", 1, 30).is_news);
    assert!(setup.learn("b.test", 1, 30).is_news, "another name");
    setup.expire(89);
    assert_eq!(setup.cache.count(PORT), 1);
    setup.expire(90);
    assert_eq!(setup.cache.count(PORT), 0);
    assert_eq!(setup.cache.deadline(), None);
}

#[test]
fn each_deadline_is_that_of_the_first_name() {
    let mut setup = Setup::new(9, 9);
    setup.learn("a.test", 1, 60);
    setup.learn("b.test", 1, 30);
    assert_eq!(setup.cache.deadline(), Some((at(30), Why::Expiry)));
    setup.expire(30);
    assert_eq!(setup.cache.deadline(), Some((at(60), Why::Expiry)));
}

#[test]
fn where_there_is_no_room_what_expires_first_goes() {
    let mut setup = Setup::new(2, 9);
    setup.learn("a.test", 1, 60);
    setup.learn("a.test", 2, 30);
    assert!(setup.learn("a.test", 3, 90).is_news);
    let mut left = setup.cache.addresses(PORT);
    left.sort_unstable();
    assert_eq!(left, [1, 3].map(|host| IpAddr::from([203, 0, 113, host])));
    assert_eq!(setup.out.counters.addresses_evicted, 1);
    assert_eq!(setup.out.reports, [], "what goes was not open");
}

#[test]
fn a_name_at_its_limit_gives_up_an_address_of_its_own() {
    let mut setup = Setup::new(9, 1);
    setup.learn("a.test", 1, 60);
    setup.learn("b.test", 1, 60);
    let learned = setup.learn("a.test", 2, 60);
    let first: IpAddr = [203, 0, 113, 1].into();
    assert_eq!(
        (learned.is_news, learned.replan),
        (true, vec![(PORT, first)])
    );
    let left = setup.cache.entry(PORT, first).expect("it has another name");
    assert_eq!(left.names.len(), 1);
}

#[test]
fn what_an_earlier_run_knew_comes_back_with_the_same_pod_alone() {
    let saved = Saved {
        ports: [("ns1_p2".into(), Some("2".into()))].into(),
        entries: vec![SavedEntry {
            port: "ns1_p2".into(),
            address: [203, 0, 113, 2].into(),
            names: vec![SavedName {
                name: name("a.test"),
                rest: Duration::from_secs(5),
                deny_rest: Duration::from_secs(6),
                is_denied: false,
                is_ended: false,
            }],
        }],
        ..Saved::default()
    };
    let known_to = |pods: &[&str]| {
        let mut cache = Cache::new(CacheLimits::default(), None, Translation::default());
        cache.load(saved.clone(), at(7));
        let opened = pods.iter();
        let known = opened.map(|pod| cache.open((PORT, SandboxId(1)), "ns1_p2", Some(pod)));
        known.collect::<Vec<_>>()
    };
    let term = Term {
        until: at(12),
        deny_until: at(13),
        is_denied: false,
        is_ended: false,
        origin: Origin::Journal,
        server: None,
    };
    let known = vec![([203, 0, 113, 2].into(), name("a.test"), term)];
    assert_eq!(known_to(&["2", "2"]), [known, vec![]], "once");
    assert_eq!(known_to(&["1"]), [[]]);
}
