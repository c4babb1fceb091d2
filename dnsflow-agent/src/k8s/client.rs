//! Connects to the Kubernetes API.

use std::{path::PathBuf, time::Duration};

use kube::{
    Client, Config,
    client::ClientBuilder,
    config::{KubeConfigOptions, Kubeconfig},
};
use tower::limit::RateLimitLayer;

use super::convert;
use crate::causes::with_causes;

/// At most this many requests per [`REQUEST_PERIOD`]. Without the limit, a proxy that accepts each
/// watch and closes it at once would be asked again without a pause. A watch lasts minutes, and a
/// page of the list holds 500 objects.
const REQUESTS_PER_PERIOD: u64 = 20;
/// See [`REQUESTS_PER_PERIOD`].
const REQUEST_PERIOD: Duration = Duration::from_secs(10);

/// At most this many characters of a message are logged.
pub(super) const MAX_MESSAGE: usize = 400;

/// How to reach the Kubernetes API.
#[derive(Clone, Debug, Default)]
pub struct ClientOptions {
    /// A kubeconfig file; without it, `KUBECONFIG`, `~/.kube/config` or the Pod's ServiceAccount.
    pub kubeconfig: Option<PathBuf>,
}

impl ClientOptions {
    async fn config(&self) -> Result<Config, String> {
        let Some(path) = &self.kubeconfig else {
            return Config::infer().await.map_err(|error| {
                format!(
                    "found no way to the Kubernetes API, neither a kubeconfig (--kubeconfig FILE \
                     names one) nor a Pod's ServiceAccount: {}",
                    chain(&error)
                )
            });
        };
        let unusable = |error: &dyn std::error::Error| {
            format!(
                "cannot use --kubeconfig {}: {}",
                path.display(),
                chain(error)
            )
        };
        let file = Kubeconfig::read_from(path).map_err(|error| unusable(&error))?;
        Config::from_custom_kubeconfig(file, &KubeConfigOptions::default())
            .await
            .map_err(|error| unusable(&error))
    }
}

/// A request without a byte of its answer for so long is given up, and made again. The server ends each watch earlier
/// (`kube::api::WatchParams::timeout`: 290 s by default), and sends bookmarks within it.
pub(super) const READ_MAX: Duration = Duration::from_secs(300);

/// A client and its URL. The client has sent nothing yet.
pub(crate) async fn connect(options: &ClientOptions) -> Result<(Client, String), String> {
    let mut config = options.config().await?;
    // kube's own retries after 429, 503 and 504 begin 5 ms apart, below the limit here, and log
    // nothing for minutes. The callers have their own back-off.
    config.default_retry = false;
    config.read_timeout = Some(READ_MAX);
    let url = config.cluster_url.to_string();
    let builder = ClientBuilder::try_from(config).map_err(|error| {
        format!(
            "cannot make a client for {url} (--kubeconfig FILE names another): {}",
            chain(&error)
        )
    })?;
    let client = builder
        .with_layer(&RateLimitLayer::new(REQUESTS_PER_PERIOD, REQUEST_PERIOD))
        .build();
    Ok((client, url))
}

/// An error and its causes on one line.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    convert::shorten(&with_causes(error).replace('\n', " "), MAX_MESSAGE)
}
