//! Any bytes as a record of the ring buffer, and as a deferred answer: what is read lies within them, and
//! what is consistent is read as it was written.
#![no_main]

use dnsflow_common::record::{
    Deferred, KIND_ANSWER, KIND_HELD, KIND_SENT, MAX_CAPTURE, Record, RecordHeader,
};
use libfuzzer_sys::fuzz_target;
use zerocopy::{FromBytes as _, IntoBytes as _};

fuzz_target!(|data: &[u8]| {
    if let Some(record) = Record::parse(data) {
        assert_eq!(record.frame.len(), data.len() - size_of::<RecordHeader>());
        assert!(record.frame.len() <= MAX_CAPTURE);
        assert!(record.header.frame_len as usize >= record.frame.len());
        assert!(matches!(
            record.header.kind,
            KIND_ANSWER | KIND_HELD | KIND_SENT
        ));
        // What the pod has not got must be there as a whole.
        let is_whole = record.header.frame_len as usize == record.frame.len();
        assert!(is_whole || record.header.kind != KIND_HELD);
    }
    // Whatever it says of itself, with the lengths that it has it is a record.
    if let Ok((mut header, frame)) = RecordHeader::read_from_prefix(data)
        && frame.len() <= MAX_CAPTURE
    {
        header.captured_len = frame.len() as u32;
        header.frame_len = frame.len() as u32;
        header.kind = KIND_HELD;
        let written = [header.as_bytes(), frame].concat();
        assert_eq!(Record::parse(&written), Some(Record { header, frame }));
        let cut = &written[..written.len() - 1];
        assert_eq!(Record::parse(cut), None);
    }
    let mut deferred = data.to_vec();
    deferred.resize(size_of::<Deferred>(), 0);
    let deferred = Deferred::read_from_bytes(&deferred).expect("its length");
    if let Some(record) = deferred.record() {
        assert_eq!(record.frame.len(), record.header.captured_len as usize);
    }
});
