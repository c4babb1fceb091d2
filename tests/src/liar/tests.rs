use dnsflow_core::dns::{Answer, DnsError};

use super::*;

fn query(behaviour: Behaviour) -> Message {
    let mut query = Message::query();
    let name = Name::from_str(&behaviour.name(3, "example.com.")).expect("a name");
    query.add_query(Query::query(name, RecordType::A));
    query
}

/// What the agent reads in each datagram: question and addresses.
fn read(behaviour: Behaviour) -> Vec<Result<(String, Vec<String>), DnsError>> {
    over_udp(&query(behaviour))
        .expect("it replies")
        .iter()
        .map(|reply| {
            let answer = Answer::decode(reply)?;
            let addresses = answer.addresses.iter();
            let addresses = addresses.map(|(address, _)| address.to_string()).collect();
            Ok((answer.question.name.to_string(), addresses))
        })
        .collect()
}

#[test]
fn every_lie_is_told_as_promised() {
    let truth = |behaviour: Behaviour| {
        Ok((
            behaviour.name(3, "example.com"),
            vec!["203.0.113.3".to_owned()],
        ))
    };
    let lie = |name: &str| Ok((name.to_owned(), vec![LIE.to_string()]));
    for behaviour in [
        Behaviour::Honest,
        Behaviour::OtherOwner,
        Behaviour::OtherSections,
        Behaviour::Chain,
    ] {
        assert_eq!(read(behaviour), [truth(behaviour)], "{behaviour:?}");
    }
    let two = Behaviour::TwoAnswers;
    assert_eq!(read(two), [truth(two), lie("two-answers.3.example.com")]);
    let wrong = lie("wrong-id.3.example.com");
    assert_eq!(
        read(Behaviour::WrongId),
        [wrong.clone(), truth(Behaviour::WrongId), wrong]
    );
    let unasked = lie("unasked.3.example.com");
    let other = Behaviour::OtherQuestion;
    assert_eq!(
        read(other),
        [unasked.clone(), truth(other), unasked.clone()]
    );
    let unsolicited = Behaviour::Unsolicited;
    assert_eq!(read(unsolicited), [truth(unsolicited), unasked]);
    assert_eq!(read(Behaviour::Loop), [Err(DnsError::CnameChain)]);
    assert!(matches!(
        read(Behaviour::HugeCount)[..],
        [Err(DnsError::Malformed(_))]
    ));
    assert!(matches!(
        read(Behaviour::PointerLoop)[..],
        [Err(DnsError::Malformed(_))]
    ));
    for behaviour in [Behaviour::Truncated, Behaviour::Slow, Behaviour::Several] {
        assert_eq!(read(behaviour), [Err(DnsError::Truncated)]);
    }
    let large = over_udp(&query(Behaviour::Large)).expect("it replies");
    assert!((4000..4096).contains(&large[0].len()), "{}", large[0].len());
}

#[test]
fn over_tcp_it_is_slow_or_in_a_hurry() {
    let segments = |behaviour| over_tcp(&query(behaviour)).expect("it replies");
    let slow = segments(Behaviour::Slow);
    assert!(slow.len() > 40 && slow.iter().all(|segment| segment.len() == 1));
    let several = segments(Behaviour::Several);
    assert_eq!(several.len(), 1);
    assert!(several[0].len() > segments(Behaviour::Truncated)[0].len() + 14);
}

#[test]
fn each_behaviour_has_a_name() {
    for behaviour in Behaviour::ALL {
        let name = Name::from_str(&behaviour.name(3, "example.com.")).expect("a name");
        assert_eq!(Behaviour::of(&name), behaviour);
    }
}
