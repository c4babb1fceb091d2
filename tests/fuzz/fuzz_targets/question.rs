//! Any bytes as the question of a message, as the program in the kernel reads them: the names that it
//! finds mentioned are those that a plain reading finds, and so is the hash.
#![no_main]

use dnsflow_common::question::{BUFFER_LEN, Buffer, NameHash, Names, question};
use libfuzzer_sys::fuzz_target;

/// The names that a rule mentions.
struct Mentioned(Vec<NameHash>);

impl Names for Mentioned {
    fn all(&self) -> bool {
        false
    }

    fn mentions(&self, hash: NameHash) -> bool {
        self.0.contains(&hash)
    }
}

/// Where the labels of a name begin, and where its root label is.
fn labels(bytes: &[u8]) -> Option<(Vec<usize>, usize)> {
    let mut starts = Vec::new();
    let mut at = 0;
    loop {
        match *bytes.get(at)? {
            0 => return Some((starts, at)),
            len @ 1..=63 => {
                starts.push(at);
                at += 1 + usize::from(len);
            }
            _ => return None,
        }
    }
}

fuzz_target!(|data: &[u8]| {
    let Some((&suffix, bytes)) = data.split_first() else {
        return;
    };
    let bytes = &bytes[..bytes.len().min(BUFFER_LEN)];
    let mut buffer = Buffer::default();
    buffer.bytes[..bytes.len()].copy_from_slice(bytes);
    let mut read =
        |names: Vec<NameHash>| question(&mut buffer, bytes.len() as u32, &Mentioned(names));
    let found = read(Vec::new());
    let plain = labels(bytes).filter(|(_, root)| *root < 255 && root + 5 <= bytes.len());
    let Some((starts, root)) = plain else {
        assert!(found.is_err());
        return;
    };
    let found = found.expect("it is a question");
    assert!(!found.mentioned);
    // Each suffix is found, in upper case as well as in lower case.
    if let Some(&start) = starts.get(usize::from(suffix) % starts.len().max(1)) {
        let name = &bytes[start..root];
        let of_lower = NameHash::of(&name.to_ascii_lowercase());
        assert_eq!(NameHash::of(name), of_lower);
        assert!(read(vec![of_lower]).expect("as before").mentioned);
        // What is no suffix is not.
        let is_suffix = |name: &[u8]| starts.iter().any(|&start| bytes[start..root] == *name);
        if name.len() > 1 && !is_suffix(&name[1..]) {
            let other = read(vec![NameHash::of(&name[1..])]).expect("as before");
            assert!(!other.mentioned);
        }
    }
    // Type and class belong to the question, whatever stands behind them does not.
    buffer.bytes[root + 5..].fill(0xff);
    let again = question(&mut buffer, bytes.len() as u32, &Mentioned(Vec::new()));
    assert_eq!(again.expect("as before").hash, found.hash);
    buffer.bytes[root + 1] ^= 1;
    let other = question(&mut buffer, bytes.len() as u32, &Mentioned(Vec::new()));
    assert_ne!(other.expect("as before").hash, found.hash);
});
