//! An OCI image archive, written without a builder of images, a base image or a registry.
//!
//! A tar file with `oci-layout`, `index.json` and `blobs/` (OCI image-spec 1.1, `image-layout.md`).
//! `ctr image import`, `podman load` and `skopeo copy oci-archive:` read it; an archive of one
//! image also has the `manifest.json` that `docker load` reads.
//!
//! Its bytes depend on what is in it, and on nothing else: entries have a fixed order, one owner
//! and one time, and the compressed layer names neither file nor time.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{BufWriter, Write},
    path::Path,
};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::source::Source;
use crate::tarball::{self, Tarball, sha256};

const LAYER: &str = "application/vnd.oci.image.layer.v1.tar+gzip";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const INDEX: &str = "application/vnd.oci.image.index.v1+json";

/// The directory of the program. It is all of the image's `PATH`.
const DIRECTORY: &str = "usr/bin";
/// The name of the program, which manifests start by this name.
const PROGRAM: &str = "dnsflow";

/// The program for one architecture.
#[derive(Clone, Debug)]
pub(super) struct Program {
    /// As OCI calls it (Go's `GOARCH`): `amd64`, `arm64`.
    pub(super) architecture: &'static str,
    /// A static executable.
    pub(super) bytes: Vec<u8>,
}

/// Writes an archive with an image for each program; the digest that the name stands for.
///
/// # Errors
///
/// Without a program, and where the file cannot be written.
pub(super) fn write(
    file: &Path,
    name: &Name,
    source: &Source,
    programs: &[Program],
) -> Result<String> {
    ensure!(!programs.is_empty(), "an image of no program");
    let mut blobs = Blobs::default();
    let mut manifests = Vec::new();
    for program in programs {
        manifests.push(blobs.image(source, program)?);
    }
    // Docker's own list knows no index of architectures.
    let docker = match &manifests[..] {
        [image] => Some(image.docker(name)),
        _ => None,
    };
    let descriptors: Vec<Value> = manifests
        .into_iter()
        .map(|image| image.descriptor)
        .collect();
    let mut named = match <[Value; 1]>::try_from(descriptors) {
        Ok([one]) => one,
        Err(many) => blobs.add_json(
            INDEX,
            &json!({
                "schemaVersion": 2,
                "mediaType": INDEX,
                "manifests": many,
                "annotations": labels(source),
            }),
        )?,
    };
    let digest = named["digest"].as_str().context("a digest")?.to_owned();
    // containerd and podman take the full name, skopeo finds an image by its tag.
    named["annotations"] = json!({
        "io.containerd.image.name": name.full(),
        "org.opencontainers.image.ref.name": name.tag,
    });
    let index = json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": [named]});

    let out = File::create(file).with_context(|| format!("cannot write {}", file.display()))?;
    let mut out = Tarball::new(BufWriter::new(out), source.seconds());
    out.directory("blobs")?;
    out.directory("blobs/sha256")?;
    for (digest, bytes) in &blobs.0 {
        out.file(&format!("blobs/sha256/{digest}"), 0o644, bytes)?;
    }
    out.file("index.json", 0o644, &serde_json::to_vec(&index)?)?;
    if let Some(docker) = docker {
        out.file("manifest.json", 0o644, &serde_json::to_vec(&docker)?)?;
    }
    let version = json!({"imageLayoutVersion": "1.0.0"});
    out.file("oci-layout", 0o644, &serde_json::to_vec(&version)?)?;
    out.finish()?.flush()?;
    Ok(digest)
}

/// The name of an image in its parts.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Name {
    /// With the registry, as containerd keeps names.
    repository: String,
    tag: String,
}

impl Name {
    /// Completes what people write: without a registry it is Docker's, without a tag `latest`
    /// (`distribution/reference`, `ParseNormalizedNamed`).
    pub(super) fn parse(text: &str) -> Result<Self> {
        let (path, tag) = match text.rsplit_once(':') {
            Some((path, tag)) if !tag.contains('/') => (path, tag),
            _ => (text, "latest"),
        };
        let plain = |text: &str| {
            !text.is_empty()
                && text
                    .bytes()
                    .all(|byte| byte.is_ascii_alphanumeric() || b"._-/:".contains(&byte))
        };
        ensure!(
            plain(path) && plain(tag),
            "{text}: not the name of an image"
        );
        let has_registry = path
            .split_once('/')
            .is_some_and(|(first, _)| first.contains(['.', ':']) || first == "localhost");
        let repository = match (has_registry, path.contains('/')) {
            (true, _) => path.to_owned(),
            (false, true) => format!("docker.io/{path}"),
            (false, false) => format!("docker.io/library/{path}"),
        };
        Ok(Self {
            repository,
            tag: tag.to_owned(),
        })
    }

    fn full(&self) -> String {
        format!("{}:{}", self.repository, self.tag)
    }
}

/// What is said of the image, by the keys of image-spec's `annotations.md`.
pub(super) fn labels(source: &Source) -> BTreeMap<&'static str, String> {
    let mut labels = BTreeMap::from([
        ("org.opencontainers.image.created", source.time.to_string()),
        (
            "org.opencontainers.image.description",
            "Opens for each pod the addresses that DNS told it, for the names in its EgressFirewall"
                .to_owned(),
        ),
        ("org.opencontainers.image.licenses", "Apache-2.0".to_owned()),
        ("org.opencontainers.image.title", PROGRAM.to_owned()),
        ("org.opencontainers.image.version", source.version.clone()),
    ]);
    if let Some(commit) = &source.commit {
        labels.insert("org.opencontainers.image.revision", commit.clone());
    }
    labels
}

/// Contents by their SHA-256, in hexadecimal.
#[derive(Default)]
struct Blobs(BTreeMap<String, Vec<u8>>);

/// An image among the blobs.
struct Image {
    descriptor: Value,
    config: String,
    layer: String,
}

impl Image {
    /// The list that `docker save` writes beside the OCI layout.
    fn docker(&self, name: &Name) -> Value {
        let blob = |digest: &str| format!("blobs/sha256/{digest}");
        json!([{
            "Config": blob(&self.config),
            "RepoTags": [name.full()],
            "Layers": [blob(&self.layer)],
        }])
    }
}

impl Blobs {
    fn add(&mut self, bytes: Vec<u8>) -> String {
        let digest = sha256(&bytes);
        self.0.insert(digest.clone(), bytes);
        digest
    }

    /// Adds a blob; its descriptor.
    fn add_typed(&mut self, media_type: &str, bytes: Vec<u8>) -> Value {
        let size = bytes.len();
        let digest = self.add(bytes);
        json!({"mediaType": media_type, "digest": format!("sha256:{digest}"), "size": size})
    }

    fn add_json(&mut self, media_type: &str, value: &Value) -> Result<Value> {
        Ok(self.add_typed(media_type, serde_json::to_vec(value)?))
    }

    /// Adds an image of one program.
    fn image(&mut self, source: &Source, program: &Program) -> Result<Image> {
        let files = layer(source, program)?;
        let content = format!("sha256:{}", sha256(&files));
        let layer = self.add_typed(LAYER, tarball::gzip(&files)?);
        let config = self.add_json(
            CONFIG,
            &json!({
                "created": source.time.to_string(),
                "architecture": program.architecture,
                "os": "linux",
                "config": {
                    "Entrypoint": [PROGRAM],
                    "Env": [format!("PATH=/{DIRECTORY}")],
                    "Labels": labels(source),
                },
                "rootfs": {"type": "layers", "diff_ids": [content]},
                "history": [{
                    "created": source.time.to_string(),
                    "created_by": "cargo xtask image --oci",
                }],
            }),
        )?;
        let manifest = json!({
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": config,
            "layers": [layer],
            "annotations": labels(source),
        });
        let mut descriptor = self.add_json(MANIFEST, &manifest)?;
        descriptor["platform"] = json!({"architecture": program.architecture, "os": "linux"});
        let digest = |descriptor: &Value| {
            let digest = descriptor["digest"].as_str();
            let hex = digest.and_then(|digest| digest.strip_prefix("sha256:"));
            hex.map(str::to_owned).context("a digest")
        };
        Ok(Image {
            config: digest(&config)?,
            layer: digest(&layer)?,
            descriptor,
        })
    }
}

/// The image's files: the program and the directories above it.
fn layer(source: &Source, program: &Program) -> Result<Vec<u8>> {
    let mut files = Tarball::new(Vec::new(), source.seconds());
    for (at, _) in DIRECTORY.match_indices('/') {
        files.directory(&DIRECTORY[..at])?;
    }
    files.directory(DIRECTORY)?;
    files.file(&format!("{DIRECTORY}/{PROGRAM}"), 0o755, &program.bytes)?;
    files.finish()
}

#[cfg(test)]
mod tests;
