//! Lists objects page by page, and parses each object as soon as its text is there.
//!
//! `Api::list` of kube keeps the text of a page, twice, beside all its objects. Objects of 1.5 MiB (etcd's
//! `--max-request-bytes`) make a page of 750 MiB. Here, no more is in memory than the text of one object.

use std::{io, marker::PhantomData};

use futures::{AsyncBufRead, AsyncBufReadExt as _, future::BoxFuture};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ListMeta;
use kube::{
    Api, Client, Resource,
    api::{ListParams, Request},
};
use serde::{
    Deserialize,
    de::{DeserializeOwned, IgnoredAny},
};

/// Objects in a page, as client-go asks for them (`defaultPageSize` in its tools/pager/pager.go).
const PAGE: u32 = 500;

/// The largest object that is read. An API server takes requests of 3 MiB (`MaxRequestBodyBytes` in
/// k8s.io/apiserver/pkg/server/config.go), and etcd of 1.5 MiB.
const OBJECT_BYTES_MAX: usize = 8 << 20;

/// The most that a page has beside its objects.
const REST_BYTES_MAX: usize = 64 << 10;

/// A list that has failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The API server refuses it, or cannot be reached.
    #[error(transparent)]
    Request(#[from] kube::Error),
    /// The answer breaks off.
    #[error("the list breaks off")]
    Read(#[source] io::Error),
    /// The answer is no list of such objects.
    #[error("the list cannot be read")]
    Parse(#[from] serde_json::Error),
    /// An object, or what comes with the objects, is too large.
    #[error("{0} of the list has more than {1} bytes; remove it, or make it smaller")]
    TooLarge(&'static str, usize),
    /// There is no version to watch from.
    #[error("the list has no metadata.resourceVersion")]
    NoVersion,
}

/// The body of a page.
type Body = std::pin::Pin<Box<dyn AsyncBufRead + Send>>;

/// A list under way.
pub(crate) struct List<K> {
    client: Client,
    url: String,
    parameters: ListParams,
    page: Page,
    splitter: Splitter,
    objects: PhantomData<fn() -> K>,
}

enum Page {
    Wanted,
    Open(Body),
    /// There are no further ones. The version of the list.
    Over(String),
}

/// What a page has beside its objects. `items` may be null.
#[derive(Deserialize)]
struct Rest {
    metadata: ListMeta,
    #[serde(rename = "items")]
    _items: IgnoredAny,
}

impl<K: DeserializeOwned> List<K> {
    /// A list of which nothing is asked for yet.
    pub(crate) fn new(api: &Api<K>, selection: ListParams) -> Self
    where
        K: Resource + Clone,
    {
        Self {
            client: api.clone().into_client(),
            url: api.resource_url().to_owned(),
            parameters: selection.limit(PAGE),
            page: Page::Wanted,
            splitter: Splitter::default(),
            objects: PhantomData,
        }
    }

    /// Asks for the next page, and waits until the server answers.
    pub(crate) async fn begin(&mut self) -> Result<(), Error> {
        self.page = Page::Open(self.open().await?);
        Ok(())
    }

    /// The next object; `None` behind the last one. After an error, the list has to begin anew.
    pub(crate) async fn next(&mut self) -> Result<Option<K>, Error> {
        loop {
            let body = match &mut self.page {
                Page::Over(_) => return Ok(None),
                Page::Open(body) => body,
                Page::Wanted => {
                    self.begin().await?;
                    continue;
                }
            };
            let part = body.fill_buf().await.map_err(Error::Read)?;
            if part.is_empty() {
                self.close()?;
                continue;
            }
            let (taken, is_object) = self.splitter.take(part)?;
            body.consume_unpin(taken);
            if is_object {
                let object = serde_json::from_slice(&self.splitter.object)?;
                self.splitter.object.clear();
                return Ok(Some(object));
            }
        }
    }

    /// The version of the list, once all objects are read.
    pub(crate) fn version(&self) -> Option<&str> {
        match &self.page {
            Page::Over(version) => Some(version),
            Page::Wanted | Page::Open(_) => None,
        }
    }

    fn open(&self) -> BoxFuture<'static, Result<Body, Error>> {
        let request = Request::new(&self.url).list(&self.parameters);
        let client = self.client.clone();
        Box::pin(async move {
            let request = request.map_err(kube::Error::BuildRequest)?;
            let body = client.request_stream(request).await?;
            Ok(Box::pin(body) as Body)
        })
    }

    /// A page has ended.
    fn close(&mut self) -> Result<(), Error> {
        let Splitter { rest, .. } = std::mem::take(&mut self.splitter);
        let Rest { metadata, .. } = serde_json::from_slice(&rest)?;
        let is_there = |text: &String| !text.is_empty();
        self.parameters.continue_token = metadata.continue_.filter(is_there);
        self.page = match self.parameters.continue_token {
            Some(_) => Page::Wanted,
            None => {
                let version = metadata.resource_version.filter(is_there);
                Page::Over(version.ok_or(Error::NoVersion)?)
            }
        };
        Ok(())
    }
}

/// Cuts the text of a page into its objects and the rest: `{"items":[],"metadata":{}}`. The only list of a page that is
/// not in another value is that of the objects.
#[derive(Debug, Default)]
struct Splitter {
    /// The object under way.
    object: Vec<u8>,
    rest: Vec<u8>,
    depth: usize,
    is_in_items: bool,
    is_in_text: bool,
    is_escaped: bool,
}

impl Splitter {
    /// Takes a part of the text, up to the end of an object. Returns the number of bytes, and whether an object is
    /// complete.
    fn take(&mut self, part: &[u8]) -> Result<(usize, bool), Error> {
        for (at, byte) in part.iter().enumerate() {
            if self.is_in_text {
                match byte {
                    _ if self.is_escaped => self.is_escaped = false,
                    b'\\' => self.is_escaped = true,
                    b'"' => self.is_in_text = false,
                    _ => {}
                }
                continue;
            }
            match byte {
                b'"' => self.is_in_text = true,
                b'[' if self.depth == 1 => {
                    self.keep(&part[..=at])?;
                    self.depth = 2;
                    self.is_in_items = true;
                    return Ok((at + 1, false));
                }
                b',' | b']' if self.depth == 2 && self.is_in_items => {
                    self.keep(&part[..at])?;
                    let is_blank = self.object.trim_ascii().is_empty();
                    if *byte == b']' {
                        self.depth = 1;
                        self.is_in_items = false;
                        self.keep(b"]")?;
                    }
                    return Ok((at + 1, *byte == b',' || !is_blank));
                }
                b'{' | b'[' => self.depth += 1,
                b'}' | b']' => self.depth = self.depth.saturating_sub(1),
                _ => {}
            }
        }
        self.keep(part)?;
        Ok((part.len(), false))
    }

    fn keep(&mut self, part: &[u8]) -> Result<(), Error> {
        let (name, text, max) = match self.is_in_items {
            true => ("an object", &mut self.object, OBJECT_BYTES_MAX),
            false => ("the metadata", &mut self.rest, REST_BYTES_MAX),
        };
        if text.len() + part.len() > max {
            return Err(Error::TooLarge(name, max));
        }
        text.extend_from_slice(part);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
