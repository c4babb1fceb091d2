use super::*;

#[test]
fn a_resolver_is_an_address_and_perhaps_a_port() {
    for (text, shown) in [
        ("10.96.0.10", "10.96.0.10:53"),
        ("10.96.0.10:5353", "10.96.0.10:5353"),
        ("fd00::a", "[fd00::a]:53"),
        ("[fd00::a]", "[fd00::a]:53"),
        ("[fd00::a]:5353", "[fd00::a]:5353"),
        ("::ffff:10.96.0.10", "10.96.0.10:53"),
    ] {
        let resolver: Resolver = text.parse().expect(text);
        assert_eq!(resolver.to_string(), shown);
        assert_eq!(resolver.to_string(), shown);
    }
}

#[test]
fn what_is_none_is_refused_with_the_cure() {
    for text in [
        "",
        "dns",
        "10.96.0",
        "10.96.0.10:",
        "10.96.0.10:70000",
        "[10.96.0.10]",
    ] {
        let error = text.parse::<Resolver>().expect_err(text);
        assert_eq!(error, ResolverError::Unknown(text.to_owned()));
        assert!(error.to_string().contains("use IP, IP:PORT or [IPv6]:PORT"));
    }
    for text in ["0.0.0.0", "::", "224.0.0.251", "ff02::fb", "10.96.0.10:0"] {
        assert_eq!(
            text.parse::<Resolver>(),
            Err(ResolverError::Impossible(text.to_owned()))
        );
    }
}
