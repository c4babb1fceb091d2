//! What an archive holds is asked of programs that this project did not write: GNU tar, sha256sum,
//! gzip, and skopeo, the client of podman's family.

use std::{fs, path::PathBuf, process::Command};

use dnsflow_tests::{
    root::Root,
    support::{not_run, root_directory, this_test},
};
use jiff::Timestamp;

use super::*;
use crate::prepare;

fn source() -> Source {
    Source {
        version: "1.2.3".to_owned(),
        commit: Some("0123abcd".to_owned()),
        time: Timestamp::from_second(1_790_000_000).expect("a time"),
    }
}

fn programs() -> Vec<Program> {
    ["amd64", "arm64"]
        .map(|architecture| Program {
            architecture,
            bytes: format!("the program for {architecture}").into_bytes(),
        })
        .to_vec()
}

/// A directory that goes with the test.
struct Directory(PathBuf);

impl Directory {
    fn new(name: &str) -> Self {
        let name = format!("dnsflow-archive-{name}-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::create_dir(&path).expect("a directory");
        Self(path)
    }

    fn archive(&self, name: &str, programs: &[Program]) -> (PathBuf, String) {
        let file = self.0.join(name);
        let image = Name::parse("dnsflow:kind").expect("a name");
        let digest = write(&file, &image, &source(), programs).expect("an archive");
        (file, digest)
    }

    fn unpacked(&self, archive: &Path) -> PathBuf {
        let directory = archive.with_extension("unpacked");
        fs::create_dir(&directory).expect("a directory");
        let mut tar = Command::new("tar");
        tar.arg("-xf").arg(archive).arg("-C").arg(&directory);
        output(&mut tar);
        directory
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).expect("it was made");
    }
}

fn output(command: &mut Command) -> String {
    dnsflow_tests::process::run(command).expect("it works")
}

fn json_of(file: &Path) -> Value {
    serde_json::from_slice(&fs::read(file).expect("a file")).expect("JSON")
}

#[test]
fn names_are_completed_as_containerd_keeps_them() {
    for (written, full) in [
        ("dnsflow", "docker.io/library/dnsflow:latest"),
        ("dnsflow:kind", "docker.io/library/dnsflow:kind"),
        ("team/dnsflow:1", "docker.io/team/dnsflow:1"),
        ("localhost/dnsflow", "localhost/dnsflow:latest"),
        ("host.example:5000/a/b", "host.example:5000/a/b:latest"),
        ("host.example/a:2", "host.example/a:2"),
    ] {
        assert_eq!(Name::parse(written).expect(written).full(), full);
    }
    for wrong in ["", "a b", ":tag", "a:"] {
        assert!(Name::parse(wrong).is_err(), "{wrong}");
    }
}

#[test]
fn the_same_makes_the_same_bytes() {
    let directory = Directory::new("same");
    let (one, digest) = directory.archive("one.tar", &programs());
    let (again, same) = directory.archive("again.tar", &programs());
    assert_eq!(digest, same);
    assert_eq!(fs::read(&one).ok(), fs::read(&again).ok());
}

#[test]
fn blobs_have_the_digests_that_they_are_called_by() {
    let directory = Directory::new("digests");
    let (archive, digest) = directory.archive("both.tar", &programs());
    let unpacked = directory.unpacked(&archive);
    let blobs = unpacked.join("blobs/sha256");
    let mut count = 0;
    for blob in fs::read_dir(&blobs).expect("blobs") {
        let blob = blob.expect("an entry").path();
        let sum = output(Command::new("sha256sum").arg(&blob));
        let name = blob.file_name().expect("a name").to_string_lossy();
        assert!(sum.starts_with(&*name), "{name}: {sum}");
        count += 1;
    }
    // A layer, a configuration and a manifest for each program, and the list of both.
    assert_eq!(count, 7);
    assert!(!unpacked.join("manifest.json").exists());

    // Every descriptor leads to a blob of its size.
    let blob = |descriptor: &Value| {
        let hex = descriptor["digest"].as_str().expect("a digest");
        let file = blobs.join(hex.strip_prefix("sha256:").expect("SHA-256"));
        let size = fs::metadata(&file).expect("a blob").len();
        assert_eq!(descriptor["size"], size, "{descriptor}");
        file
    };
    let index = json_of(&unpacked.join("index.json"));
    let named = &index["manifests"][0];
    assert_eq!(named["digest"], digest);
    let list = json_of(&blob(named));
    for (at, program) in programs().iter().enumerate() {
        let descriptor = &list["manifests"][at];
        assert_eq!(descriptor["platform"]["architecture"], program.architecture);
        let manifest = json_of(&blob(descriptor));
        let config = json_of(&blob(&manifest["config"]));
        assert_eq!(config["architecture"], program.architecture);
        // What the layer is without compression, by gzip and sha256sum.
        let layer = blob(&manifest["layers"][0]);
        let script = format!("gzip -dc {} | sha256sum", layer.display());
        let sum = output(Command::new("sh").args(["-c", &script]));
        let content = config["rootfs"]["diff_ids"][0].as_str().expect("a digest");
        assert_eq!(content, format!("sha256:{}", &sum[..64]));
    }
}

#[test]
fn the_layer_holds_the_program_and_nothing_else() {
    let directory = Directory::new("layer");
    let (archive, _) = directory.archive("one.tar", &programs()[..1]);
    let unpacked = directory.unpacked(&archive);
    let manifest = &json_of(&unpacked.join("manifest.json"))[0];
    let layer = unpacked.join(manifest["Layers"][0].as_str().expect("a layer"));
    let mut list = Command::new("tar");
    list.args(["-tvzf"]).arg(&layer).env("TZ", "UTC");
    list.args(["--numeric-owner", "--full-time"]);
    let time = "2026-09-21 14:13:20";
    assert_eq!(
        output(&mut list)
            .lines()
            .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
            .collect::<Vec<_>>(),
        [
            format!("drwxr-xr-x 0/0 0 {time} usr/"),
            format!("drwxr-xr-x 0/0 0 {time} usr/bin/"),
            format!("-rwxr-xr-x 0/0 21 {time} usr/bin/dnsflow"),
        ]
    );
}

#[test]
fn skopeo_reads_what_is_written() {
    let path = root_directory(prepare::SKOPEO.0).expect("target");
    let Ok(root) = Root::existing(&path) else {
        not_run(&this_test(), "no skopeo; `cargo xtask test` fetches one");
        return;
    };
    let skopeo = |arguments: &[&str]| {
        let mut skopeo = root.command("skopeo").expect("skopeo");
        output(skopeo.arg("--insecure-policy").args(arguments))
    };
    let directory = Directory::new("skopeo");
    let (both, digest) = directory.archive("both.tar", &programs());
    let both = format!("oci-archive:{}:kind", both.display());
    let raw = skopeo(&["inspect", "--raw", &both]);
    assert_eq!(format!("sha256:{}", sha256(raw.as_bytes())), digest);
    for program in programs() {
        let inspected = skopeo(&[
            "--override-arch",
            program.architecture,
            "inspect",
            "--no-tags",
            &both,
        ]);
        let inspected: Value = serde_json::from_str(&inspected).expect("JSON");
        assert_eq!(inspected["Architecture"], program.architecture);
        assert_eq!(inspected["Created"], "2026-09-21T14:13:20Z");
        let labels = &inspected["Labels"];
        assert_eq!(labels["org.opencontainers.image.version"], "1.2.3");
        assert_eq!(labels["org.opencontainers.image.revision"], "0123abcd");
    }
    // Copying compares every digest.
    let copy = format!("dir:{}", directory.0.join("copy").display());
    skopeo(&["copy", "--all", &both, &copy]);

    // One program: Docker reads it, too.
    let (one, _) = directory.archive("one.tar", &programs()[..1]);
    let one = format!("docker-archive:{}", one.display());
    let copy = format!("dir:{}", directory.0.join("docker").display());
    skopeo(&["copy", &one, &copy]);
    let inspected = skopeo(&["inspect", "--config", &one]);
    let inspected: Value = serde_json::from_str(&inspected).expect("JSON");
    assert_eq!(inspected["config"]["Entrypoint"], json!(["dnsflow"]));
    assert_eq!(inspected["config"]["Env"], json!(["PATH=/usr/bin"]));
}
