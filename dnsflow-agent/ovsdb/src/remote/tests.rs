#![allow(clippy::unwrap_used)]

use proptest::prelude::*;

use super::*;

#[test]
fn addresses_as_ovs_writes_them() {
    for (text, expected) in [
        ("unix:/run/db.sock", "unix:/run/db.sock"),
        ("tcp:10.0.0.1:6641", "tcp:10.0.0.1:6641"),
        ("tcp:ovn.example", "tcp:ovn.example:6640"),
        ("tcp:[fd00::1]:6642", "tcp:[fd00::1]:6642"),
        ("tcp:[fd00::1]", "tcp:[fd00::1]:6640"),
    ] {
        assert_eq!(text.parse::<Remote>().unwrap().to_string(), expected);
    }
}

#[test]
fn refusals_say_what_to_write_instead() {
    for text in [
        "ssl:10.0.0.1:6641",
        "punix:/run/x",
        "/run/db.sock",
        "unix:",
        "tcp:",
        "tcp::6641",
        "tcp:host:0",
        "tcp:host:port",
        "tcp:[fd00::1",
        "tcp:[fd00::1]6641",
        "tcp:[[]",
        "tcp:[host]:1",
        "tcp:a]",
        "",
    ] {
        let message = text.parse::<Remotes>().unwrap_err().to_string();
        assert!(
            message.contains("use unix:PATH or tcp:HOST:PORT"),
            "{text}: {message}"
        );
    }
    assert_eq!(
        "ssl:a:1".parse::<Remote>(),
        Err(RemoteError::Tls("ssl:a:1".into()))
    );
}

#[test]
fn lists_are_separated_by_commas() {
    let remotes: Remotes = "tcp:a:1, tcp:b:2,".parse().unwrap();
    let texts: Vec<String> = remotes.iter().map(ToString::to_string).collect();
    assert_eq!(texts, ["tcp:a:1", "tcp:b:2"]);
    let many = vec!["tcp:a:1"; REMOTES_MAX + 1].join(",");
    assert_eq!(many.parse::<Remotes>(), Err(RemoteError::TooMany));
}

proptest! {
    #[test]
    fn no_text_panics_and_what_is_read_is_written_the_same(text in "(unix|tcp|ssl)?:?[a-z0-9:\\[\\]/.]{0,20}") {
        if let Ok(remote) = text.parse::<Remote>() {
            prop_assert_eq!(remote.to_string().parse::<Remote>(), Ok(remote));
        }
    }
}
