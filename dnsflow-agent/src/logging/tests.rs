use std::sync::{Mutex, mpsc};

use super::*;

/// A reader of the log, which takes a line whenever `gate` gives it leave.
struct Reader {
    lines: Arc<Mutex<Vec<u8>>>,
    arrived: mpsc::Sender<()>,
    gate: mpsc::Receiver<()>,
}

impl Write for Reader {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let _nobody_waits = self.arrived.send(());
        // An error once the gate has been taken away: then every line passes.
        let _open = self.gate.recv();
        self.lines.lock().expect("no panic").extend(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn writing_to(output: impl Write + Send + 'static, lines_max: usize) -> (NonBlocking, Log) {
    let (_, level) = LogLevel::of(EnvFilter::new("info"));
    Log::writing_to(output, lines_max, level)
}

fn numbered(range: std::ops::Range<usize>) -> String {
    range.map(|number| format!("line {number}\n")).collect()
}

fn write(writer: &NonBlocking, range: std::ops::Range<usize>) {
    for number in range {
        let line = format!("line {number}\n");
        let written = writer.clone().write_all(line.as_bytes());
        written.expect("it never fails");
    }
}

#[test]
fn nobody_waits_for_a_reader_and_what_is_lost_is_counted() {
    let lines = Arc::<Mutex<Vec<u8>>>::default();
    let (arrived, arrivals) = mpsc::channel();
    let (gate, gate_of_reader) = mpsc::channel();
    let reader = Reader {
        lines: Arc::clone(&lines),
        arrived,
        gate: gate_of_reader,
    };
    let (writer, log) = writing_to(reader, 8);
    write(&writer, 0..1);
    // The log's thread is stuck with this one, so that the queue is empty.
    arrivals.recv().expect("the reader is asked");
    write(&writer, 1..9);
    assert_eq!(log.lost_lines().count(), 0);
    write(&writer, 9..14);
    assert_eq!(log.lost_lines().count(), 5);
    drop(gate);
    drop(log);
    let text = String::from_utf8(lines.lock().expect("no panic").clone());
    assert_eq!(text.expect("text"), numbered(0..9));
}

#[test]
fn the_last_lines_are_written_before_the_end() {
    let lines = Arc::<Mutex<Vec<u8>>>::default();
    let reader = Reader {
        lines: Arc::clone(&lines),
        arrived: mpsc::channel().0,
        gate: mpsc::channel().1,
    };
    let (writer, log) = writing_to(reader, 1000);
    write(&writer, 0..1000);
    assert_eq!(log.lost_lines().count(), 0);
    drop(log);
    let text = String::from_utf8(lines.lock().expect("no panic").clone());
    assert_eq!(text.expect("text"), numbered(0..1000));
}

#[test]
fn the_last_lines_are_kept_up_to_a_limit() {
    let (writer, log) = writing_to(io::sink(), 100_000);
    let last = log.view().last;
    write(&writer, 0..50_000);
    drop(log);
    let kept = String::from_utf8(last.read()).expect("text");
    assert!(kept.len() <= LastLines::BYTES_MAX, "{} bytes", kept.len());
    let first = kept.lines().count();
    assert!(first > LastLines::BYTES_MAX / 20, "{first} lines");
    assert_eq!(kept, numbered(50_000 - first..50_000));
}

#[test]
fn lines_that_cannot_be_written_count_as_lost() {
    /// A reader that has gone.
    struct Gone;

    impl Write for Gone {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::BrokenPipe.into())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    let (writer, log) = writing_to(Gone, 8);
    write(&writer, 0..3);
    let lost = log.lost_lines();
    drop(log);
    assert_eq!(lost.count(), 3);
}
