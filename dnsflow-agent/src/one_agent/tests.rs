use std::process;

use super::*;

const SHORT: Duration = Duration::from_millis(200);

/// A name of the test's own.
fn name(test: &str) -> Vec<u8> {
    format!("dnsflow-one-agent-{test}-{}", process::id()).into_bytes()
}

#[tokio::test]
async fn the_second_one_learns_whom_it_has_met() {
    let name = name("met");
    let first = claim(&name, SHORT).expect("nobody else");
    let answering = first.answering();
    let serving = tokio::spawn(Claim::answer(answering));
    let second = tokio::task::spawn_blocking(move || claim(&name, SHORT));
    let error = second.await.expect("no panic").expect_err("one runs");
    let OneAgentError::Another(met) = &error else {
        panic!("{error}");
    };
    assert_eq!(met.pid, i32::try_from(process::id()).ok());
    let about = met.about.as_ref().expect("it answers");
    assert_eq!(about.version, VERSION);
    assert!(about.up_s < 60, "{about:?}");
    let text = error.to_string();
    assert!(
        text.contains("version") && text.contains("started 20"),
        "{text}"
    );
    serving.abort();
}

#[test]
fn one_that_does_not_answer_is_named_all_the_same() {
    let name = name("silent");
    let _first = claim(&name, SHORT).expect("nobody else");
    let met = || match meet(&name) {
        Ok(Holder::Agent(met)) => met.to_string(),
        _ => panic!("it is there"),
    };
    let text = met();
    let process = format!("process {}, which does not answer", process::id());
    assert!(text.starts_with(&process), "{text}");
    // As many as the kernel lets wait: nobody gets a connection any more, and nobody waits for one.
    let address = SocketAddrUnix::new_abstract_name(&name).expect("short");
    let connection = || {
        let socket = new_socket().expect("a socket");
        connect(&socket, &address).is_ok()
    };
    while connection() {}
    assert!(met().contains("does not answer"));
}

#[test]
fn the_name_is_free_when_the_holder_has_ended() {
    let name = name("free");
    let first = claim(&name, SHORT).expect("nobody else");
    let waiting = thread::spawn({
        let name = name.clone();
        move || claim(&name, PATIENCE)
    });
    thread::sleep(SHORT);
    assert!(!waiting.is_finished(), "it waits");
    drop(first);
    let second = waiting.join().expect("no panic").expect("it is free");
    let Holder::Agent(met) = meet(&name).expect("it can be asked") else {
        panic!("it is taken");
    };
    assert!(met.pid.is_some());
    drop(second);
    assert!(matches!(meet(&name), Ok(Holder::Gone)));
}
