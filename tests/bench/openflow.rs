//! dnsflow's own OpenFlow client, without the agent around it.

use std::{net::Ipv4Addr, path::PathBuf, sync::Arc, time::Duration};

use anyhow::{Context, Result, bail};
use dnsflow_agent::openflow::{Connection, Event};
use dnsflow_core::{
    io::input::{BatchId, FlowQuestion, FlowReply},
    values::flow::{Action, Addresses, Cookie, FlowBody, FlowChange, FlowKey},
};
use tokio::{runtime::Runtime, time::timeout};

/// The switch answers within milliseconds, or not at all.
const LIMIT: Duration = Duration::from_secs(10);
/// The tag of the bench's own flows: not one that the agent would make up by chance.
const COOKIE: Cookie = Cookie::new(0xbe9c_0000);

/// A connection to the switch.
#[derive(Debug)]
pub(crate) struct Client {
    runtime: Runtime,
    connection: Connection,
    batches: u64,
}

impl Client {
    /// Connects.
    pub(crate) fn connect(socket: PathBuf) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let mut client = Self {
            runtime,
            connection: Connection::new(socket),
            batches: 0,
        };
        client.wait(|event| matches!(event, Event::Up).then_some(()))?;
        Ok(client)
    }

    fn wait<T>(&mut self, mut wanted: impl FnMut(Event) -> Option<T>) -> Result<T> {
        let Self {
            runtime,
            connection,
            ..
        } = self;
        runtime.block_on(async {
            let found = async {
                loop {
                    let event = connection.next().await;
                    if let Event::Down { reason } = &event {
                        bail!("{reason}");
                    }
                    if let Some(found) = wanted(event) {
                        return Ok(found);
                    }
                }
            };
            timeout(LIMIT, found)
                .await
                .context("the switch is silent")?
        })
    }

    /// The keys of every flow of dnsflow's.
    pub(crate) fn flows(&mut self) -> Result<Vec<FlowKey>> {
        self.connection.ask(FlowQuestion::Dump { number: 0 });
        let mut keys = Vec::new();
        self.wait(|event| {
            let Event::Reply(FlowReply::Flows { flows, more, .. }) = event else {
                return None;
            };
            keys.extend(flows.into_iter().map(|flow| flow.key));
            (!more).then_some(())
        })?;
        Ok(keys)
    }

    /// Adds a flow like this one, from one address to another; returns when the switch has
    /// answered the barrier.
    pub(crate) fn add(&mut self, like: &FlowKey, src: Ipv4Addr, dst: Ipv4Addr) -> Result<()> {
        let mut key = like.clone();
        key.matches.ends = Addresses::V4 { src, dst }.into();
        let body = FlowBody {
            cookie: COOKIE,
            hard_timeout_s: 300,
            actions: Arc::new([Action::Resubmit {
                table: key.table + 1,
            }]),
        };
        self.batches += 1;
        let batch = BatchId(self.batches);
        let changes = vec![FlowChange::Add(key, body)];
        self.connection.apply(batch, false, changes, Vec::new());
        let applied = self.wait(|event| match event {
            Event::Applied { batch: of, result } if of == batch => Some(result),
            _ => None,
        })?;
        applied.context("the switch refuses a flow")
    }
}
