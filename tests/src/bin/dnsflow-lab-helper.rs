//! What a lab runs inside its namespaces besides Debian's programs: the web server, and DNS
//! queries of exactly one packet each.

use std::{
    net::{Ipv4Addr, SocketAddr, UdpSocket},
    process::ExitCode,
    time::Duration,
};

use anyhow::{Result, bail, ensure};
use hickory_proto::{
    op::{Message, Query},
    rr::{Name, RData, RecordType},
};

const ANSWER_BYTES_MAX: usize = 4096;
const ANSWER_LIMIT: Duration = Duration::from_secs(1);

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let result = match *arguments {
        // The directory of the lab stands there for whoever looks for its processes.
        ["web", ref sockets @ .., _lab] => sockets
            .iter()
            .map(|socket| socket.parse().map_err(anyhow::Error::from))
            .collect::<Result<Vec<SocketAddr>>>()
            .and_then(|sockets| dnsflow_tests::web::serve(&sockets)),
        ["resolve", server, kind, ref names @ ..] => names
            .iter()
            .try_for_each(|name| resolve(server, kind, name)),
        _ => {
            eprintln!(
                "dnsflow-lab-helper web ADDRESS:PORT... LAB | resolve SERVER:PORT A|AAAA NAME..."
            );
            return ExitCode::from(2);
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Sends one query for the name's addresses and prints those of the answer.
fn resolve(server: &str, kind: &str, name: &str) -> Result<()> {
    let kind: RecordType = kind.parse()?;
    let server: SocketAddr = server.parse()?;
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    socket.connect(server)?;
    socket.set_read_timeout(Some(ANSWER_LIMIT))?;
    let mut query = Message::query();
    query.metadata.recursion_desired = true;
    query.add_query(Query::query(Name::from_ascii(name)?, kind));
    socket.send(&query.to_vec()?)?;
    let mut buffer = [0; ANSWER_BYTES_MAX];
    let length = socket.recv(&mut buffer)?;
    let answer = Message::from_vec(&buffer[..length])?;
    ensure!(answer.metadata.id == query.metadata.id, "not our answer");
    if answer.answers.is_empty() {
        bail!("no answer: {}", answer.metadata.response_code);
    }
    for record in &answer.answers {
        match record.data {
            RData::A(address) => println!("{}", address.0),
            RData::AAAA(address) => println!("{}", address.0),
            _ => {}
        }
    }
    Ok(())
}
