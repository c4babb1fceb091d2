//! A real API server on loopback.
//!
//! One for custom resources: upstream's own, built once by Go below `target/`, over Debian's etcd
//! of the release under test. It serves what the definition of a resource says, as a cluster
//! does: validation, list, watch, bookmarks, compaction. It has no core/v1. Whom it does not know
//! as an administrator, it asks the tests' own server about, by SubjectAccessReview.
//!
//! And a whole one, where `KUBEBUILDER_ASSETS` names a directory with kube-apiserver and etcd, as
//! setup-envtest lays them out. It judges by RBAC itself.

use std::{
    fs::{self, File},
    io::Read as _,
    net::{SocketAddr, TcpListener},
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicU16, Ordering::Relaxed},
};

use anyhow::{Context, Result, ensure};
use dnsflow_tests::{
    apiserver,
    process::{PATIENT, run, wait_until},
    root::Root,
    support::{LEFT_TO_OTHERS, ROOT_VARIABLE},
};
use rustix::process::{Signal, set_parent_process_death_signal};
use serde_json::{Value, json};

/// The environment variable that names the directory of kube-apiserver and etcd
/// (sigs.k8s.io/controller-runtime, package envtest).
const ASSETS_VARIABLE: &str = "KUBEBUILDER_ASSETS";

/// What a test runs on.
#[derive(Clone, Debug)]
pub(crate) enum Programs {
    /// A server for custom resources, over etcd of a Debian release.
    CustomResources { etcd: Root, server: PathBuf },
    /// The directory of a whole kube-apiserver and its etcd.
    Whole(PathBuf),
}

impl Programs {
    /// A whole server, or why there is none here.
    pub(crate) fn whole() -> Result<Self> {
        let directory = std::env::var_os(ASSETS_VARIABLE)
            .map(PathBuf::from)
            .with_context(|| format!("{ASSETS_VARIABLE} is not set; {LEFT_TO_OTHERS}"))?;
        for program in ["kube-apiserver", "etcd"] {
            let file = directory.join(program);
            ensure!(
                file.is_file(),
                "{ASSETS_VARIABLE} is set, but there is no {}",
                file.display()
            );
        }
        Ok(Self::Whole(directory))
    }

    /// A server for custom resources: fetches and builds what is not there yet.
    pub(crate) fn custom_resources() -> Result<Self> {
        let suite = match std::env::var_os(ROOT_VARIABLE) {
            Some(root) => PathBuf::from(root)
                .file_name()
                .context("a root without a name")?
                .to_string_lossy()
                .into_owned(),
            None => "bookworm".to_owned(),
        };
        let (etcd, server) = apiserver::ensure(&suite, &|text| eprintln!("{text}"))?;
        Ok(Self::CustomResources { etcd, server })
    }

    fn etcd(&self) -> Result<Command> {
        match self {
            Self::CustomResources { etcd, .. } => etcd.command("etcd"),
            Self::Whole(directory) => Ok(Command::new(directory.join("etcd"))),
        }
    }

    /// The server's own arguments.
    fn server(&self) -> Command {
        match self {
            Self::CustomResources { server, .. } => {
                let mut command = Command::new(server);
                command
                    .args(["--authentication-kubeconfig", "own"])
                    .arg("--authentication-skip-lookup")
                    .args(["--authorization-kubeconfig", "core"])
                    .args(["--kubeconfig", "own"])
                    .args(["--requestheader-client-ca-file", "ca.crt"])
                    .arg("--enable-priority-and-fairness=false")
                    // They would ask core/v1, which is not there.
                    .arg(
                        "--disable-admission-plugins=NamespaceLifecycle,\
                         MutatingAdmissionWebhook,ValidatingAdmissionWebhook,\
                         MutatingAdmissionPolicy,ValidatingAdmissionPolicy",
                    );
                command
            }
            // Kubernetes, "kube-apiserver". No controller makes ServiceAccounts for namespaces,
            // nor is a namespace made for each object.
            Self::Whole(directory) => {
                let mut command = Command::new(directory.join("kube-apiserver"));
                command
                    .arg("--authorization-mode=RBAC")
                    .arg("--allow-privileged=true")
                    .arg("--disable-admission-plugins=NamespaceLifecycle,ServiceAccount")
                    .arg("--service-cluster-ip-range=10.96.0.0/16")
                    .args(["--service-account-issuer", "https://127.0.0.1"])
                    .args(["--service-account-key-file", "server.crt"])
                    .args(["--service-account-signing-key-file", "server.key"])
                    .args(["--cert-dir", "certificates"]);
                command
            }
        }
    }
}

/// A running server, and its etcd. Dropping it ends both and removes their files.
#[derive(Debug)]
pub(crate) struct ApiServer {
    programs: Programs,
    directory: PathBuf,
    etcd: Option<Child>,
    server: Option<Child>,
    /// The port of the server.
    pub(crate) port: u16,
    etcd_port: u16,
}

impl ApiServer {
    /// Starts both, in a directory named after the test. `core` is the address of the tests' own
    /// server, which a server for custom resources asks for SubjectAccessReviews.
    pub(crate) fn start(programs: &Programs, test: &str, core: Option<SocketAddr>) -> Result<Self> {
        let name = format!("dnsflow-api-{test}-{}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        fs::create_dir(&directory)?;
        let mut server = Self {
            programs: programs.clone(),
            directory,
            etcd: None,
            server: None,
            port: free_port()?,
            etcd_port: free_port()?,
        };
        server.make_certificates()?;
        if let Some(core) = core {
            let core = kubeconfig(&format!("http://{core}"), json!({}), json!({}));
            fs::write(server.path("core"), core.to_string())?;
        }
        let own = server.kubeconfig("admin", server.port)?;
        fs::copy(own, server.path("own"))?;
        server.etcd = Some(server.start_etcd()?);
        server.restart()?;
        Ok(server)
    }

    /// Writes a file that goes with the server; its path.
    pub(crate) fn write(&self, name: &str, text: &str) -> Result<PathBuf> {
        let path = self.path(name);
        fs::write(&path, text)?;
        Ok(path)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// A kubeconfig of this user (`admin` or `agent`), for the server behind this port.
    pub(crate) fn kubeconfig(&self, user: &str, port: u16) -> Result<PathBuf> {
        let cluster = json!({"certificate-authority": self.path("ca.crt")});
        let credentials = json!({
            "client-certificate": self.path(&format!("{user}.crt")),
            "client-key": self.path(&format!("{user}.key")),
        });
        let path = self.path(&format!("{user}-{port}.kubeconfig"));
        let text = kubeconfig(&format!("https://127.0.0.1:{port}"), cluster, credentials);
        fs::write(&path, text.to_string())?;
        Ok(path)
    }

    fn make_certificates(&self) -> Result<()> {
        run(Command::new("openssl").arg("version")).context("openssl makes the certificates")?;
        let key = [
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:P-256",
            "-nodes",
        ];
        let openssl = |arguments: &[&str]| {
            let mut command = Command::new("openssl");
            run(command.args(arguments).current_dir(&self.directory))
        };
        let mut authority = vec!["req", "-x509", "-keyout", "ca.key", "-out", "ca.crt"];
        authority.extend(["-subj", "/CN=ca", "-days", "2"]);
        authority.extend(key);
        openssl(&authority)?;
        for (name, subject, extension) in [
            ("server", "/CN=localhost", "subjectAltName=IP:127.0.0.1"),
            (
                "admin",
                "/O=system:masters/CN=admin",
                "extendedKeyUsage=clientAuth",
            ),
            (
                "agent",
                "/O=system:serviceaccounts/CN=system:serviceaccount:dnsflow:dnsflow",
                "extendedKeyUsage=clientAuth",
            ),
        ] {
            let file = |ending: &str| format!("{name}.{ending}");
            let (key_file, request, certificate) = (file("key"), file("csr"), file("crt"));
            let mut asking = vec![
                "req", "-keyout", &key_file, "-out", &request, "-subj", subject,
            ];
            asking.extend(key);
            openssl(&asking)?;
            // Without an extension it would be a certificate of X.509 version 1, which rustls
            // refuses.
            fs::write(self.path("extensions"), extension)?;
            let mut signing = vec!["x509", "-req", "-in", &request, "-out", &certificate];
            signing.extend(["-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial"]);
            signing.extend(["-days", "2", "-extfile", "extensions"]);
            openssl(&signing)?;
        }
        Ok(())
    }

    fn start_etcd(&self) -> Result<Child> {
        let mut command = self.programs.etcd()?;
        let client = format!("http://127.0.0.1:{}", self.etcd_port);
        command
            .arg("--data-dir")
            .arg(self.path("etcd"))
            .args(["--listen-client-urls", &client])
            .args(["--advertise-client-urls", &client])
            .args(["--listen-peer-urls", "http://127.0.0.1:0"]);
        spawn(&mut command, &self.path("etcd.log"))
    }

    /// Ends the server, if it runs, and starts it: it forgets the events that it had in memory.
    pub(crate) fn restart(&mut self) -> Result<()> {
        end(&mut self.server);
        let etcd = format!("http://127.0.0.1:{}", self.etcd_port);
        let mut command = self.programs.server();
        command
            .args(["--etcd-servers", &etcd])
            .args(["--bind-address", "127.0.0.1"])
            .args(["--secure-port", &self.port.to_string()])
            .args(["--client-ca-file", "ca.crt"])
            .args(["--tls-cert-file", "server.crt"])
            .args(["--tls-private-key-file", "server.key"])
            .current_dir(&self.directory);
        self.server = Some(spawn(&mut command, &self.path("server.log"))?);
        let address = SocketAddr::from(([127, 0, 0, 1], self.port));
        let waited = wait_until("the API server to listen", PATIENT, || {
            if let Some(server) = &mut self.server
                && let Some(status) = server.try_wait()?
            {
                anyhow::bail!("it has ended ({status})");
            }
            Ok(std::net::TcpStream::connect(address).is_ok())
        });
        waited.map(drop).with_context(|| self.log())
    }

    /// Forgets every revision of etcd but the last.
    pub(crate) fn compact(&self) -> Result<()> {
        let call = |path: &str, body: Value| -> Result<Value> {
            post(self.etcd_port, &format!("/v3/{path}"), &body)
        };
        let found = call("kv/range", json!({"key": "AA=="}))?;
        let revision = found["header"]["revision"].as_str().context("a revision")?;
        let compacted = call(
            "kv/compaction",
            json!({"revision": revision, "physical": true}),
        )?;
        ensure!(compacted["header"].is_object(), "{compacted}");
        Ok(())
    }

    fn log(&self) -> String {
        let log = fs::read_to_string(self.path("server.log")).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(20)..].join("\n")
    }
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the end of the API server's log:\n{}", self.log());
        }
        end(&mut self.server);
        end(&mut self.etcd);
        if let Err(error) = fs::remove_dir_all(&self.directory) {
            eprintln!("cannot remove {}: {error}", self.directory.display());
        }
    }
}

/// A kubeconfig in JSON, which is YAML too.
pub(crate) fn kubeconfig(server: &str, mut cluster: Value, user: Value) -> Value {
    cluster["server"] = json!(server);
    json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "c", "user": user}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "c"}}],
    })
}

/// A port that nobody has, below those that the kernel gives to clients (ip(7),
/// `ip_local_port_range`), so that it stays free until it is used.
fn free_port() -> Result<u16> {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let first = u16::try_from(std::process::id() % 10_000)?;
    for _ in 0..100 {
        let step = NEXT.fetch_add(1, Relaxed);
        let port = 20_000 + (first + step) % 10_000;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return Ok(port);
        }
    }
    anyhow::bail!("no free port")
}

fn spawn(command: &mut Command, log: &Path) -> Result<Child> {
    let output = File::options().create(true).append(true).open(log)?;
    // SAFETY: one system call; no allocation, no lock.
    unsafe {
        command.pre_exec(|| {
            set_parent_process_death_signal(Some(Signal::KILL))?;
            Ok(())
        });
    }
    command
        .stdin(Stdio::null())
        .stdout(output.try_clone()?)
        .stderr(output)
        .spawn()
        .with_context(|| format!("cannot run {command:?}"))
}

fn end(child: &mut Option<Child>) {
    if let Some(mut child) = child.take() {
        // It may have ended already; then both calls have nothing to do.
        let ended = child.kill().and_then(|()| child.wait());
        if let Err(error) = ended {
            eprintln!("cannot end {}: {error}", child.id());
        }
    }
}

/// A POST to etcd's JSON gateway, and the answer's body.
fn post(port: u16, path: &str, body: &Value) -> Result<Value> {
    use std::io::Write as _;
    let mut stream = std::net::TcpStream::connect(("127.0.0.1", port))?;
    let body = body.to_string();
    write!(
        stream,
        "POST {path} HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (_, body) = answer.split_once("\r\n\r\n").context("an answer")?;
    serde_json::from_str(body).with_context(|| answer.clone())
}
