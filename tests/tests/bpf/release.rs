//! Frames that are taken off the way between two real stacks, with all that veths leave to
//! devices, and put back by the releaser.

use std::{
    fs,
    io::{self, Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    num::NonZeroU32,
    os::fd::{AsRawFd as _, OwnedFd},
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use dnsflow_agent::capture::{AttachKind, Options, ReleaseError, Releaser};
use dnsflow_common::Reason;
use dnsflow_core::ovn::rows::RowId;
use dnsflow_tests::{
    frames::{Answer, Frame},
    process::{PATIENT, wait_until},
    raw_program::RawProgram,
    support::{LEFT_TO_VM, not_run, this_test},
    wire::packet_socket,
};

use crate::{
    Loaded,
    hold::mark_clearing,
    load,
    netns::{Elsewhere, Queue, Wire, add_veth, ifindex, in_new_netns, remove_link, wait_until_up},
};

const MARK: u32 = 0x646e_7366;
const MTU: u32 = 1500;
/// `struct virtio_net_hdr` (Linux include/uapi/linux/virtio_net.h).
const VNET_HEADER_LEN: usize = 10;
const NEEDS_CSUM: u8 = 1;
// Linux include/uapi/linux/if_packet.h.
const PACKET_VNET_HDR: i32 = 15;
const PACKET_IGNORE_OUTGOING: i32 = 23;

fn addresses(v6: bool) -> (IpAddr, IpAddr) {
    let [server, pod] = match v6 {
        false => ["192.0.2.53", "192.0.2.5"],
        true => ["fd00::53", "fd00::5"],
    };
    let parse = |text: &str| text.parse().expect("an address");
    (parse(server), parse(pod))
}

/// A packet socket that gives the kernel's header with each frame.
struct Tap(OwnedFd);

impl Tap {
    fn open(name: &str, option: (i32, u32)) -> Self {
        let options = [(PACKET_VNET_HDR, 1), option];
        Self(packet_socket(name, &options, Duration::from_millis(50)))
    }

    /// What comes in.
    fn open_incoming(name: &str) -> Self {
        Self::open(name, (PACKET_IGNORE_OUTGOING, 1))
    }

    /// The next frame behind its header, if one comes soon.
    fn read(&self) -> Option<Vec<u8>> {
        let mut bytes = vec![0; 1 << 17];
        let len = rustix::io::read(&self.0, &mut bytes[..]).ok()?;
        bytes.truncate(len);
        Some(bytes)
    }
}

/// A frame as it was taken off the way to the pod.
#[derive(Clone, Debug)]
struct Taken {
    /// What the kernel says that it lacks.
    flags: u8,
    gso_size: u16,
    frame: Vec<u8>,
}

/// A server and a pod in namespaces of their own, and between them a node that takes every frame
/// off the wire.
struct Node {
    server: Elsewhere,
    pod: Elsewhere,
}

impl Node {
    /// Makes it in this thread's namespace.
    fn new() -> Self {
        let node = Self {
            server: Elsewhere::new(),
            pod: Elsewhere::new(),
        };
        add_veth("server-host", "server", MTU);
        add_veth("pod-host", "pod", MTU);
        let (server, pod) = (addresses(false), addresses(true));
        node.server.adopt("server", &[(server.0, 24), (pod.0, 64)]);
        node.pod.adopt("pod", &[(server.1, 24), (pod.1, 64)]);
        node
    }

    /// Carries frames to and fro while `f` runs; those to the pod by the releaser, after `change`.
    /// Gives what was put back.
    fn carry<T>(
        &self,
        change: impl Fn(&mut Vec<u8>) + Sync,
        f: impl FnOnce(&Self) -> T,
    ) -> (T, Vec<Taken>) {
        let (server, pod) = (
            Tap::open_incoming("server-host"),
            Tap::open_incoming("pod-host"),
        );
        let over = AtomicBool::new(false);
        let taken = Mutex::new(Vec::new());
        let releaser = Releaser::open(MARK).expect("a packet socket");
        let result = thread::scope(|scope| {
            scope.spawn(|| {
                let ifindex = ifindex("pod-host");
                while !over.load(Ordering::Relaxed) {
                    let Some(mut bytes) = server.read() else {
                        continue;
                    };
                    let mut frame = bytes.split_off(VNET_HEADER_LEN);
                    change(&mut frame);
                    let gso_size = u16::from_ne_bytes([bytes[4], bytes[5]]);
                    releaser
                        .release(ifindex, &frame, gso_size)
                        .expect("the frame leaves");
                    let flags = bytes[0];
                    taken.lock().expect("not poisoned").push(Taken {
                        flags,
                        gso_size,
                        frame,
                    });
                }
            });
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    if let Some(frame) = pod.read() {
                        rustix::io::write(&server.0, &frame).expect("the frame leaves");
                    }
                }
            });
            // The carriers end also where this panics.
            let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| f(self)));
            over.store(true, Ordering::Relaxed);
            result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        });
        (result, taken.into_inner().expect("not poisoned"))
    }

    /// A counter of the pod's UDP: `InCsumErrors` or `InDatagrams`.
    fn pod_udp(&self, v6: bool, counter: &str) -> u64 {
        self.pod
            .run(|| match v6 {
                false => {
                    let text = fs::read_to_string("/proc/thread-self/net/snmp").expect("counters");
                    let mut lines = text.lines().filter(|line| line.starts_with("Udp: "));
                    let (names, values) = (lines.next(), lines.next());
                    let names = names.into_iter().flat_map(str::split_whitespace);
                    let values = values.into_iter().flat_map(str::split_whitespace);
                    let found = names.zip(values).find(|(name, _)| *name == counter);
                    found.and_then(|(_, value)| value.parse().ok())
                }
                true => {
                    let text = fs::read_to_string("/proc/thread-self/net/snmp6").expect("counters");
                    text.lines()
                        .filter_map(|line| line.strip_prefix("Udp6")?.strip_prefix(counter))
                        .find_map(|value| value.trim().parse().ok())
                }
            })
            .expect("the counter")
    }
}

/// Runs a test on such a node, once with each family.
fn on_a_node(test: impl Fn(&Node, bool) + Send + Sync) {
    for v6 in [false, true] {
        in_new_netns(|| {
            if let Err(error) = Releaser::open(MARK) {
                not_run(&this_test(), error);
                return;
            }
            test(&Node::new(), v6);
        });
    }
}

fn answer() -> Vec<u8> {
    Answer::new("www.example.com", &["198.51.100.7".parse().expect("v4")]).build()
}

/// A socket of the server, one of the pod, and its address.
fn sockets(node: &Node, v6: bool) -> (UdpSocket, UdpSocket, SocketAddr) {
    let (server, pod) = addresses(v6);
    let server = node.server.run(|| UdpSocket::bind((server, 53)));
    let pod = node.pod.run(|| UdpSocket::bind((pod, 40_000)));
    let (server, pod) = (server.expect("a socket"), pod.expect("a socket"));
    pod.set_read_timeout(Some(PATIENT)).expect("a timeout");
    let address = pod.local_addr().expect("an address");
    (server, pod, address)
}

fn is_to(frame: &[u8], port: u16) -> bool {
    // Neither has IP options here.
    let at = if frame.get(12) == Some(&0x08) { 36 } else { 56 };
    frame.get(at..at + 2) == Some(&port.to_be_bytes())
}

#[test]
fn an_answer_without_its_checksum_arrives() {
    on_a_node(|node, v6| {
        let (received, taken) = node.carry(
            |_| {},
            |node| {
                let (server, pod, address) = sockets(node, v6);
                server.send_to(&answer(), address).expect("sent");
                let mut buffer = [0; 2000];
                let (len, from) = pod.recv_from(&mut buffer).expect("the answer arrives");
                assert_eq!(from.port(), 53);
                assert_eq!(&buffer[..len], answer());
                address.port()
            },
        );
        let taken = taken.iter().find(|taken| is_to(&taken.frame, received));
        let flags = taken.expect("it was put back").flags;
        assert_eq!(flags, NEEDS_CSUM, "the veth left the checksum to a device");
        assert_eq!(node.pod_udp(v6, "InCsumErrors"), 0);
    });
}

#[test]
fn what_the_network_spoilt_arrives_spoilt() {
    on_a_node(|node, v6| {
        // Complete, and then one bit wrong.
        let spoil = |frame: &mut Vec<u8>| {
            if frame.ends_with(&answer()) {
                let at = frame.len() - answer().len() - 2;
                frame[at..at + 2].copy_from_slice(&[0x12, 0x34]);
            }
        };
        node.carry(spoil, |node| {
            let (server, _pod, address) = sockets(node, v6);
            server.send_to(&answer(), address).expect("sent");
            wait_until("the checksum's error", PATIENT, || {
                Ok(node.pod_udp(v6, "InCsumErrors") == 1)
            })
            .expect("it is counted");
        });
    });
}

#[test]
fn a_stream_in_long_segments_arrives() {
    on_a_node(|node, v6| {
        let stream: Vec<u8> = (0..1_000_000u32).map(|at| (at / 7) as u8).collect();
        let (port, taken) = node.carry(
            |_| {},
            |node| {
                let (server, _) = addresses(v6);
                let listener = node.server.run(|| TcpListener::bind((server, 53)));
                let listener = listener.expect("a socket");
                let server = SocketAddr::new(server, 53);
                let pod = node
                    .pod
                    .run(|| TcpStream::connect_timeout(&server, PATIENT));
                let mut pod = pod.expect("connected");
                pod.set_read_timeout(Some(PATIENT)).expect("a timeout");
                let (mut server, _) = listener.accept().expect("connected");
                server.set_write_timeout(Some(PATIENT)).expect("a timeout");
                thread::scope(|scope| {
                    scope.spawn(|| server.write_all(&stream).expect("sent"));
                    let mut received = vec![0; stream.len()];
                    pod.read_exact(&mut received).expect("the stream arrives");
                    assert!(received == stream);
                });
                pod.local_addr().expect("an address").port()
            },
        );
        let long = |taken: &&Taken| taken.gso_size > 0 && taken.frame.len() > MTU as usize + 14;
        let long = taken.iter().filter(long).count();
        assert!(long > 0, "no long segment to {port} among {}", taken.len());
    });
}

/// A frame that an interface of any namespace takes.
fn any_frame() -> Frame {
    Frame::to_pod(answer())
}

#[test]
fn a_frame_leaves_with_its_bytes_and_the_mark() {
    in_new_netns(|| {
        add_veth("pod-host", "pod", MTU);
        let Ok(releaser) = Releaser::open(MARK) else {
            not_run(&this_test(), "no packet socket may be opened");
            return;
        };
        let marked = Tap::open("pod-host", (PACKET_IGNORE_OUTGOING, 0));
        let pod = Tap::open_incoming("pod");
        only_with_mark(&marked, MARK);
        let frame = any_frame().build();
        releaser
            .release(ifindex("pod-host"), &frame, 0)
            .expect("released");
        for tap in [&marked, &pod] {
            let mut found = None;
            wait_until("the frame", PATIENT, || {
                found = tap.read();
                Ok(found
                    .as_ref()
                    .is_some_and(|found| found[VNET_HEADER_LEN..] == frame))
            })
            .expect("it comes");
        }
    });
}

/// Lets a tap see only packets with this mark.
fn only_with_mark(tap: &Tap, mark: u32) {
    // `SKF_AD_OFF + SKF_AD_MARK` (Linux include/uapi/linux/filter.h).
    let mark_at = (-0x1000i32 + 20).cast_unsigned();
    let instruction = |code: u16, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    // Load the word; if it is the mark, take all of the frame; else nothing.
    let mut filter = [
        instruction(0x20, 0, 0, mark_at),
        instruction(0x15, 0, 1, mark),
        instruction(0x06, 0, 0, u32::MAX),
        instruction(0x06, 0, 0, 0),
    ];
    let program = libc::sock_fprog {
        len: filter.len() as u16,
        filter: filter.as_mut_ptr(),
    };
    // SAFETY: the program and its instructions live longer than the call.
    let set = unsafe {
        libc::setsockopt(
            tap.0.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_FILTER,
            (&raw const program).cast(),
            size_of_val(&program) as u32,
        )
    };
    assert_eq!(set, 0, "{}", io::Error::last_os_error());
}

#[test]
fn what_cannot_leave_says_why() {
    in_new_netns(|| {
        add_veth("pod-host", "pod", MTU);
        let Ok(releaser) = Releaser::open(MARK) else {
            not_run(&this_test(), "no packet socket may be opened");
            return;
        };
        let host = ifindex("pod-host");
        let mut long = any_frame();
        long.payload.resize(MTU as usize, 0);
        let long = long.build();
        let error = releaser.release(host, &long, 0).expect_err("too long");
        assert!(matches!(error, ReleaseError::TooLong), "{error:?}");

        let mut tagged = any_frame();
        tagged.tags.push((0x8100, 5));
        let error = releaser.release(host, &tagged.build(), 0);
        assert!(matches!(error, Err(ReleaseError::Tagged)), "{error:?}");

        let error = releaser.release(host, &any_frame().build(), 500);
        let not_segmentable = matches!(error, Err(ReleaseError::NotSegmentable));
        assert!(not_segmentable, "{error:?}");

        remove_link("pod-host");
        let error = releaser.release(host, &any_frame().build(), 0);
        assert!(
            matches!(error, Err(ReleaseError::InterfaceGone)),
            "{error:?}"
        );
    });
}

/// How the frames to a pod come to wait for hours.
#[derive(Clone, Copy, Debug)]
enum Wait {
    /// The bandwidth to the pod is limited.
    AtHost,
    /// A hostile pod hands its frames on to a slow interface in its own network namespace.
    InPod,
}

/// A pod that frames are put back to.
struct Pod {
    ifindex: u32,
    /// The pod's end, unless it is in another namespace.
    tap: Option<Tap>,
    _elsewhere: Option<Elsewhere>,
    /// Other programs on the pod's interface.
    _links: Vec<OwnedFd>,
}

/// A program that sends every packet out of an interface instead, as `tc action mirred` does.
fn redirecting(ifindex: u32) -> RawProgram {
    // r1 = ifindex; r2 = 0; r0 = bpf_redirect(r1, r2); exit.
    let program = RawProgram::load(&[
        0x0000_0000_0000_01b7 | u64::from(ifindex) << 32,
        0x0000_0000_0000_02b7,
        0x0000_0017_0000_0085,
        0x95,
    ]);
    program.expect("the kernel takes it")
}

/// Pods in this thread's namespace, with the programs on their interfaces.
struct Pods {
    program: Loaded,
    /// Another program in front of ours clears the marks of packets.
    are_marks_cleared: bool,
    count: u128,
}

impl Pods {
    fn add(&mut self) -> (Pod, [String; 2]) {
        self.count += 1;
        let [host, pod] = ["host", "pod"].map(|end| format!("{end}{}", self.count));
        add_veth(&host, &pod, MTU);
        let ifindex = ifindex(&host);
        self.program.attached_to_row(RowId::new(self.count), &host);
        let link = self
            .are_marks_cleared
            .then(|| mark_clearing().attach_first_to_egress(ifindex));
        let added = Pod {
            ifindex,
            tap: None,
            _elsewhere: None,
            _links: link.map(|link| link.expect("TCX")).into_iter().collect(),
        };
        (added, [host, pod])
    }

    /// A pod that takes what it is sent, through this queue.
    fn add_quick(&mut self, queue: Option<Queue>) -> io::Result<Pod> {
        let (mut added, [_, pod]) = self.add();
        added.tap = Some(Tap::open_incoming(&pod));
        queue.map_or(Ok(()), |queue| queue.put_onto(added.ifindex))?;
        Ok(added)
    }

    /// A pod whose frames wait.
    fn add_slow(&mut self, wait: Wait) -> io::Result<Pod> {
        let (mut added, [host, pod]) = self.add();
        match wait {
            Wait::AtHost => Queue::SLOW.put_onto(added.ifindex)?,
            Wait::InPod => {
                let elsewhere = Elsewhere::new();
                elsewhere.adopt(&pod, &[]);
                // Its other end had no carrier meanwhile.
                wait_until_up(&host);
                let link = elsewhere.run(|| {
                    add_veth("slow", "end", MTU);
                    let slow = ifindex("slow");
                    Queue::SLOW.put_onto(slow)?;
                    redirecting(slow).attach_to_ingress(ifindex(&pod))
                })?;
                added._elsewhere = Some(elsewhere);
                added._links.push(link);
            }
        }
        // A twin of the agent's socket, without a mark.
        let twin = Wire::open(&host);
        for _ in 0..10 {
            twin.send(&long_frame());
        }
        assert_ne!(twin.charged(), 0, "{wait:?}: the frames are gone");
        Ok(added)
    }
}

fn long_frame() -> Vec<u8> {
    let mut long = any_frame();
    long.payload.resize(1400, 0);
    long.build()
}

/// Runs a test with a releaser whose socket the programs know.
fn with_pods(
    attach: Option<AttachKind>,
    test: impl FnOnce(Pods, Releaser) -> io::Result<()> + Send,
) {
    let options = Options {
        attach,
        release_mark: NonZeroU32::new(MARK),
        ..Options::default()
    };
    in_new_netns(|| {
        let Some(program) = load(&options) else {
            return;
        };
        let pods = Pods {
            program,
            are_marks_cleared: false,
            count: 0,
        };
        let releaser = Releaser::open(MARK).expect("a packet socket");
        if let Err(error) = test(pods, releaser) {
            let why = format!("this kernel has no tbf or no TCX: {error}");
            not_run(&this_test(), format!("{why}; {LEFT_TO_VM}"));
        }
    });
}

/// Three other pods lose nothing while so many pods have all frames waiting that they may have: a new one, one that was
/// sent frames before, and one whose interface has a queue.
fn they_lose_nothing(
    mut pods: Pods,
    releaser: Releaser,
    wait: Wait,
    numbers_of_slow: &[usize],
) -> io::Result<()> {
    let frame = any_frame().build();
    let long = long_frame();
    let quick = Queue {
        bytes_per_second: 1_000_000_000,
        burst: 1 << 20,
        ..Queue::SLOW
    };
    let earlier = pods.add_quick(None)?;
    let queueing = pods.add_quick(Some(quick))?;
    let mut lost = Vec::new();
    let mut slow = Vec::new();
    releaser
        .release(earlier.ifindex, &frame, 0)
        .expect("released");
    for number in numbers_of_slow {
        while slow.len() < *number {
            let added = pods.add_slow(wait)?;
            for _ in 0..1000 {
                // Whether it loses its own is not the question.
                releaser.release(added.ifindex, &long, 0).ok();
            }
            slow.push(added);
        }
        let new = pods.add_quick(None)?;
        for (name, pod) in [
            ("earlier", &earlier),
            ("queueing", &queueing),
            ("new", &new),
        ] {
            let arrives = |_: &u32| {
                let released = releaser.release(pod.ifindex, &frame, 0);
                released.is_ok() && pod.expect(&frame)
            };
            let arrived = (0..1000).filter(arrives).count();
            lost.push((number, name, 1000 - arrived));
        }
    }
    assert!(lost.iter().all(|(.., lost)| *lost == 0), "{lost:?}");
    Ok(())
}

impl Pod {
    /// Waits for a frame.
    fn expect(&self, frame: &[u8]) -> bool {
        let tap = self.tap.as_ref().expect("the pod's end is here");
        wait_until("the frame", PATIENT, || {
            let found = tap.read();
            Ok(found.is_some_and(|found| found[VNET_HEADER_LEN..] == *frame))
        })
        .is_ok()
    }
}

#[test]
fn slow_pods_take_nothing_from_the_others() {
    with_pods(None, |pods, releaser| {
        they_lose_nothing(pods, releaser, Wait::AtHost, &[7, 8, 9, 40])
    });
}

#[test]
fn slow_pods_take_nothing_from_the_others_with_clsact() {
    with_pods(Some(AttachKind::Clsact), |pods, releaser| {
        they_lose_nothing(pods, releaser, Wait::AtHost, &[9])
    });
}

#[test]
fn pods_that_delay_frames_themselves_take_nothing_from_the_others() {
    with_pods(None, |pods, releaser| {
        they_lose_nothing(pods, releaser, Wait::InPod, &[9])
    });
}

#[test]
fn slow_pods_take_nothing_from_the_others_though_marks_are_cleared() {
    with_pods(Some(AttachKind::Tcx), |mut pods, releaser| {
        add_veth("host", "pod", MTU);
        if mark_clearing().attach_to_egress(ifindex("host")).is_err() {
            not_run(&this_test(), "this kernel has no TCX");
            return Ok(());
        }
        pods.are_marks_cleared = true;
        they_lose_nothing(pods, releaser, Wait::AtHost, &[9])
    });
}

#[test]
fn a_pod_whose_queue_is_full_loses_its_own_answers_and_they_are_counted() {
    with_pods(None, |mut pods, releaser| {
        let short = Queue {
            room: 100_000,
            ..Queue::SLOW
        };
        let full = pods.add_quick(Some(short))?;
        let other = pods.add_quick(None)?;
        let frame = any_frame().build();
        let mut dropped = 0;
        for _ in 0..1000 {
            match releaser.release(full.ifindex, &long_frame(), 0) {
                Ok(()) => {}
                Err(ReleaseError::Dropped) => dropped += 1,
                Err(error) => panic!("{error:?}"),
            }
            releaser
                .release(other.ifindex, &frame, 0)
                .expect("another interface is not concerned");
            assert!(other.expect(&frame));
        }
        // Some 70 have room.
        assert!(dropped > 900, "{dropped}");
        let lost = releaser.lost().read();
        let lost: Vec<_> = lost.into_iter().filter(|(_, count)| *count > 0).collect();
        assert_eq!(lost, [("dropped", dropped)]);
        let released = pods.program.capture.counters.of(Reason::Released);
        assert_eq!(released.expect("read"), 2000, "each is counted once");
        Ok(())
    });
}

/// The frames that an earlier agent held go back while its programs are still there.
#[test]
fn slow_pods_take_nothing_from_the_others_before_the_programs_are_the_agents_own() {
    with_pods(None, |pods, _| {
        let next = Releaser::open(!MARK).expect("a packet socket");
        they_lose_nothing(pods, next, Wait::AtHost, &[9])
    });
}
