//! The agent in a container of the DaemonSet's Pod: in a root and with mounts of its own, which end with it.
//!
//! Command, options and mounts are those of `deploy/base`: a change there that loses what outlives the agent fails the
//! tests.

use std::{env, fs, path::Path, process::Command};

use anyhow::{Context, Result};
use dnsflow_tests::{agent, lab::Lab, support::OPEN_BY_VARIABLE, topology::DNS_SERVICE};
use k8s_openapi::api::core::v1::Volume;

use crate::manifests::Objects;

/// Mounts each file or directory that is named first where the next word says, in an empty root, and runs there what
/// follows. `size=…` is an emptyDir. The root is read-only, as that of the container.
const CONTAINER: &str = r#"
set -e
root=$1
shift
mount -t tmpfs image "$root"
while [ "$1" != -- ]; do
    if [ -f "$1" ]; then
        mkdir -p "$(dirname "$root$2")"
        touch "$root$2"
    else
        mkdir -p "$root$2"
    fi
    case $1 in
        size=*) mount -t tmpfs -o "$1" emptyDir "$root$2" ;;
        *) mount --rbind "$1" "$root$2" ;;
    esac
    shift 2
done
shift
mount -o remount,ro "$root"
exec chroot "$root" "$@"
"#;
/// What a program needs of an image, and what each container has.
const DIRECTORIES: &[&str] = &["/bin", "/usr", "/lib", "/lib64", "/proc", "/sys", "/dev"];
/// Where the image has the binary, and how programs are found.
const BINARY: &str = "/sbin/dnsflow";
const PATH: &str = "/sbin:/usr/sbin:/usr/bin:/bin";
/// An option that needs an API server.
const DNS_SERVICE_VARIABLE: &str = "DNSFLOW_DNS_SERVICE";

/// The command line of an agent in a new container on this lab's node. Instead of an API server, it knows a directory
/// with EgressFirewalls and the address of the DNS service.
pub(super) fn command(lab: &Lab) -> Result<Command> {
    let objects = Objects::base()?;
    let container = objects.container()?;
    let mut options = objects.options()?.clone();
    options.remove(DNS_SERVICE_VARIABLE);
    let root = lab.base().join("container");
    fs::create_dir_all(&root)?;
    let mut command = Command::new("unshare");
    command
        .args(["--mount", "--", "sh", "-c", CONTAINER, "sh"])
        .arg(root);
    for directory in DIRECTORIES {
        if Path::new(directory).exists() {
            command.args([directory, directory]);
        }
    }
    command.arg(agent::binary()?).arg(BINARY);
    command.arg(lab.manifests()).arg("/manifests");
    let volumes = objects.pod()?.volumes.as_deref().unwrap_or_default();
    for mount in container.volume_mounts.as_deref().unwrap_or_default() {
        let mut volumes = volumes.iter();
        let volume = volumes.find(|volume| volume.name == mount.name);
        let volume = volume.with_context(|| format!("no volume {}", mount.name))?;
        command.arg(source(lab, volume)?).arg(&mount.mount_path);
    }
    command
        .arg("--")
        .args(container.command.iter().flatten())
        .args(container.args.iter().flatten())
        .args([
            "--manifests=/manifests",
            &format!("--resolver={DNS_SERVICE}"),
        ])
        .env_clear()
        .envs(options)
        .env("PATH", PATH)
        .envs(env::var_os(OPEN_BY_VARIABLE).map(|way| (OPEN_BY_VARIABLE, way)));
    lab.node().enter(&mut command)?;
    Ok(command)
}

/// What is mounted for a volume. A directory of the node is one of the lab, which the kubelet makes.
fn source(lab: &Lab, volume: &Volume) -> Result<String> {
    if let Some(empty) = &volume.empty_dir {
        // As mount(8) writes it, without the `i` of a quantity.
        let size = empty.size_limit.as_ref().map_or("50%", |size| &size.0);
        return Ok(format!("size={}", size.trim_end_matches('i')));
    }
    let host_path = volume.host_path.as_ref().context("a hostPath")?;
    let directory = match host_path.path.split_at_checked("/sys/fs/bpf".len()) {
        Some(("/sys/fs/bpf", rest)) => lab.bpf_fs()?.join(rest.trim_start_matches('/')),
        _ if host_path.path == "/var/run/openvswitch" => lab.socket(""),
        _ => lab
            .base()
            .join("node")
            .join(host_path.path.trim_start_matches('/')),
    };
    fs::create_dir_all(&directory)?;
    let directory = directory.into_os_string().into_string();
    directory.ok().context("a path in UTF-8")
}
