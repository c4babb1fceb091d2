use kube::core::Status;

use super::*;

#[test]
fn a_kind_of_trouble_is_told_once_until_it_is_over() {
    let mut trouble = Trouble::default();
    let start = Instant::now();
    let at = |seconds| start + Duration::from_secs(seconds);
    assert!(trouble.is_news(Kind::NoAnswer, at(0)));
    // "connection refused", then "connection reset", then "refused" again.
    for seconds in [10, 90, 180] {
        assert!(!trouble.is_news(Kind::NoAnswer, at(seconds)));
    }
    assert!(trouble.is_news(Kind::Answer(503), at(181)));
    for seconds in [182, 190] {
        assert!(!trouble.is_news(Kind::NoAnswer, at(seconds)));
        assert!(!trouble.is_news(Kind::Answer(503), at(seconds)));
    }
    // A new outage after a time of silence.
    assert!(trouble.is_news(Kind::NoAnswer, at(190) + TROUBLE_OVER));
    trouble.over("http://api");
    assert!(trouble.is_news(Kind::NoAnswer, at(191) + TROUBLE_OVER));
}

#[test]
fn causes_name_the_url_and_the_cure() {
    let subject = Subject {
        what: "Things".into(),
        missing: "has no Things: install them.".into(),
        permission: "list of things".into(),
    };
    let error = |code: u16| {
        let status = Status::failure("said the server", "Reason").with_code(code);
        Error::Watch(kube::Error::Api(status.boxed()))
    };
    let cause = |code| describe(&error(code), "http://api:1", &subject);
    assert_eq!(cause(410), None);
    for (code, remedy) in [
        (404, "has no Things: install them."),
        (403, "needs list of things"),
        (401, "--kubeconfig FILE"),
        (500, "said the server"),
    ] {
        let text = cause(code).expect("a cause");
        assert!(
            text.contains("http://api:1") && text.contains(remedy),
            "{text}"
        );
    }
}
