//! The names that the pods of a namespace ask for, while somebody records them (`dnsflow learn`).
//!
//! Nothing is remembered of a name that no rule mentions. A recording is the exception: of one namespace,
//! for a time, and up to a number of names. Meanwhile the kernel hands over every answer to the
//! namespace's pods.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    time::Duration,
};

use crate::{
    Timestamp,
    tools::deadline::{self, Deadline, Why},
    values::{ids::RecordingId, name::DomainName},
};

/// Recordings at the same time.
pub const RECORDINGS_MAX: usize = 4;
/// Names of a recording. At 100 bytes each, which is usual, they take 400 kB.
pub const NAMES_MAX: usize = 4096;
/// The longest recording.
pub const TIME_MAX: Duration = Duration::from_secs(3600);
/// A recording goes on for so much longer, so that its last names can be read.
const READING_TIME: Duration = Duration::from_secs(10);
/// Addresses that are kept of a name, to show where it leads.
const ADDRESSES_MAX: usize = 8;

/// A name that pods were told addresses for.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct RecordedName {
    /// The name, as it was asked for.
    pub name: DomainName,
    /// The addresses of the first answer, but those that are never opened; at most eight.
    pub addresses: Vec<IpAddr>,
}

/// All recordings.
#[derive(Debug, Default)]
pub(crate) struct Recordings(BTreeMap<RecordingId, Recording>);

/// One recording.
#[derive(Debug)]
pub(crate) struct Recording {
    namespace: String,
    until: Timestamp,
    /// In the order in which they came.
    names: Vec<RecordedName>,
    known: BTreeSet<DomainName>,
    /// Answers for names that found no room.
    left_out: u64,
}

impl Recordings {
    /// Begins a recording. Nothing happens if there are [`RECORDINGS_MAX`] already.
    pub(crate) fn begin(
        &mut self,
        id: RecordingId,
        namespace: String,
        time: Duration,
        now: Timestamp,
    ) {
        let Self(recordings) = self;
        if recordings.len() < RECORDINGS_MAX {
            let recording = Recording {
                namespace,
                until: now + time.min(TIME_MAX) + READING_TIME,
                names: Vec::new(),
                known: BTreeSet::new(),
                left_out: 0,
            };
            recordings.entry(id).or_insert(recording);
        }
    }

    /// Ends a recording, and forgets its names.
    pub(crate) fn end(&mut self, id: RecordingId) {
        self.0.remove(&id);
    }

    /// Whether names of this namespace are recorded.
    pub(crate) fn are_of(&self, namespace: &str) -> bool {
        self.0.values().any(|one| one.namespace == namespace)
    }

    /// Records a name that a pod of this namespace was told addresses for.
    pub(crate) fn note(&mut self, namespace: &str, name: &DomainName, addresses: &[IpAddr]) {
        let recordings = self.0.values_mut();
        for recording in recordings.filter(|one| one.namespace == namespace) {
            if recording.known.contains(name) {
                continue;
            }
            if recording.names.len() == NAMES_MAX {
                recording.left_out += 1;
                continue;
            }
            recording.known.insert(name.clone());
            recording.names.push(RecordedName {
                name: name.clone(),
                addresses: addresses.iter().copied().take(ADDRESSES_MAX).collect(),
            });
        }
    }

    /// When [`Recordings::timeout`] wants to be called.
    pub(crate) fn deadline(&self) -> Option<Deadline> {
        let until = self.0.values().map(|one| one.until).min();
        deadline::at(until, Why::Recording)
    }

    /// Ends the recordings whose time is over; returns whether there were any.
    pub(crate) fn timeout(&mut self, now: Timestamp) -> bool {
        let before = self.0.len();
        self.0.retain(|_, one| one.until > now);
        self.0.len() < before
    }

    /// A recording, while it goes on.
    pub(crate) fn get(&self, id: RecordingId) -> Option<&Recording> {
        self.0.get(&id)
    }
}

impl Recording {
    /// At most `count` names from this one on, and how many answers found no room.
    pub(crate) fn read(&self, from: usize, count: usize) -> (Vec<RecordedName>, u64) {
        let names = self.names.iter().skip(from).take(count);
        (names.cloned().collect(), self.left_out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: RecordingId = RecordingId(7);

    fn name(text: &str) -> DomainName {
        text.parse().expect("a name")
    }

    fn begun(time: Duration) -> Recordings {
        let mut recordings = Recordings::default();
        recordings.begin(ID, "ns1".into(), time, Timestamp::default());
        recordings
    }

    #[test]
    fn a_name_is_recorded_once_and_only_for_its_namespace() {
        let mut recordings = begun(Duration::from_secs(60));
        let address = IpAddr::from([203, 0, 113, 1]);
        recordings.note("ns1", &name("a.test"), &[address; 20]);
        recordings.note("ns1", &name("A.test"), &[]);
        recordings.note("ns2", &name("b.test"), &[address]);
        let (names, left_out) = recordings.get(ID).expect("it goes on").read(0, 10);
        assert_eq!(names.len(), 1);
        assert_eq!(names[0].addresses, [address; ADDRESSES_MAX]);
        assert_eq!(left_out, 0);
        assert!(
            recordings
                .get(ID)
                .expect("it goes on")
                .read(1, 10)
                .0
                .is_empty()
        );
    }

    #[test]
    fn names_beyond_the_limit_are_counted() {
        let mut recordings = begun(Duration::from_secs(60));
        for number in 0..NAMES_MAX + 3 {
            recordings.note("ns1", &name(&format!("n{number}.test")), &[]);
        }
        let (names, left_out) = recordings.get(ID).expect("it goes on").read(0, usize::MAX);
        assert_eq!((names.len(), left_out), (NAMES_MAX, 3));
    }

    #[test]
    fn a_recording_ends_and_there_are_only_so_many() {
        let mut recordings = begun(2 * TIME_MAX);
        let until = Timestamp::default() + TIME_MAX + READING_TIME;
        assert_eq!(recordings.deadline(), Some((until, Why::Recording)));
        for number in 0..10 {
            let id = RecordingId(100 + number);
            recordings.begin(id, "ns2".into(), TIME_MAX, Timestamp::default());
        }
        assert_eq!(recordings.0.len(), RECORDINGS_MAX);
        recordings.end(RecordingId(100));
        assert!(recordings.are_of("ns2"));
        assert!(!recordings.timeout(Timestamp::default()));
        assert!(recordings.timeout(until));
        assert!(!recordings.are_of("ns1"));
        assert_eq!(recordings.deadline(), None);
    }
}
