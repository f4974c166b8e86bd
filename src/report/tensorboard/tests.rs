use std::fs;

use protobuf::Message;
use serde_json::json;
use tensorboard_rs::masked_crc32c::masked_crc32c;

use super::*;

const NAME: FileName<'_> = FileName { seconds: 1_700_000_000, host: "a/b.c", pid: 7, n: 0 };

fn scalar(tag: &str, value: f64) -> Scalar {
    Scalar { tag: tag.to_owned(), value: Some(value), description: "what it is".to_owned() }
}

/// The events of a file up to its last whole record.
fn read(folder: &Path) -> Vec<Vec<Event>> {
    let mut paths: Vec<_> = fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()).collect();
    paths.sort();
    paths.iter().map(|path| events(&fs::read(path).unwrap())).collect()
}

fn events(mut bytes: &[u8]) -> Vec<Event> {
    let mut events = Vec::new();
    while bytes.len() >= 12 {
        let len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let crc = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        assert_eq!(masked_crc32c(&bytes[..8]), crc(8));
        if bytes.len() < 16 + len {
            break;
        }
        let data = &bytes[12..12 + len];
        assert_eq!(masked_crc32c(data), crc(12 + len));
        events.push(Event::parse_from_bytes(data).unwrap());
        bytes = &bytes[16 + len..];
    }
    events
}

#[test]
fn nothing_is_in_the_file_before_a_flush_and_all_of_it_after() {
    let folder = tempfile::tempdir().unwrap();
    let mut writer = Writer::create(folder.path(), &NAME, 1.5).unwrap();
    let path = folder.path().join("events.out.tfevents.1700000000.a-b-c.7.0");
    writer.scalars(Step::new(1), 2.5, &[scalar("a", 0.0), scalar("b", f64::NAN)]).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().len(), 0);
    writer.flush().unwrap();
    writer.flush().unwrap();
    let absent = Scalar { value: None, ..scalar("a", 0.0) };
    writer.scalars(Step::new(2), 3.5, &[absent]).unwrap();
    writer.scalars(Step::new(3), 3.5, &[scalar("a", f64::INFINITY)]).unwrap();
    writer.flush().unwrap();

    let events = &read(folder.path())[0];
    assert_eq!(events.len(), 3);
    assert_eq!((events[0].get_file_version(), events[0].get_wall_time()), ("brain.Event:2", 1.5));
    let first = events[1].get_summary().get_value();
    assert_eq!((events[1].get_step(), events[1].get_wall_time(), first.len()), (1, 2.5, 2));
    assert_eq!(first[0].get_metadata().get_summary_description(), "what it is");
    assert!(first[1].get_simple_value().is_nan());
    let later = &events[2].get_summary().get_value()[0];
    assert_eq!((events[2].get_step(), later.get_simple_value()), (3, f32::INFINITY));
    assert!(!later.has_metadata());

    // A file that was cut inside its last record still reads up to it.
    let bytes = fs::read(&path).unwrap();
    assert_eq!(self::events(&bytes[..bytes.len() - 1]).len(), 2);
}

#[test]
fn steps_of_a_tag_rise_and_an_error_writes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let mut writer = Writer::create(folder.path(), &NAME, 0.0).unwrap();
    writer.scalars(Step::new(5), 0.0, &[scalar("a", 1.0)]).unwrap();
    let before = writer.buffer.clone();
    for (step, expect) in [
        (5, "TensorBoard tag a: step 5 was given, but steps from 6 on are due"),
        (0, "TensorBoard tag a: step 0 was given, but steps from 6 on are due"),
        (u64::MAX, "step 18446744073709551615 is too large for TensorBoard; the largest is"),
        (i64::MAX as u64, "step 9223372036854775807 is too large for TensorBoard; the largest is"),
    ] {
        let scalars = [scalar("b", 1.0), scalar("a", 1.0)];
        let error = writer.scalars(Step::new(step), 0.0, &scalars).unwrap_err().to_string();
        assert!(error.starts_with(expect), "{error}");
        assert_eq!(writer.buffer, before);
    }
    writer.scalars(Step::new(6), 0.0, &[scalar("b", 1.0), scalar("a", 1.0)]).unwrap();
}

#[test]
fn k27_a_resumed_run_goes_on_in_a_later_file_that_says_where() {
    let folder = tempfile::tempdir().unwrap();
    let mut first = Writer::create(folder.path(), &NAME, 0.0).unwrap();
    first.scalars(Step::new(150), 0.0, &[scalar("a", 1.0)]).unwrap();
    first.flush().unwrap();
    // By a process whose number sorts first, in the same second or with the clock set back.
    let name = FileName { pid: 1, seconds: NAME.seconds - 3600, ..NAME };
    let mut second = Writer::resume(folder.path(), &name, 9.0, Step::new(100)).unwrap();
    assert!(second.scalars(Step::new(99), 9.0, &[scalar("a", 1.0)]).is_err());
    second.scalars(Step::new(100), 9.0, &[scalar("a", 2.0)]).unwrap();
    second.flush().unwrap();

    let files = read(folder.path());
    assert_eq!(files.len(), 2);
    assert_eq!(files[1][0].get_file_version(), "brain.Event:2");
    let start = &files[1][1];
    assert_eq!(start.get_session_log().get_status(), SessionLog_SessionStatus::START);
    assert_eq!(start.get_step(), 100);
    assert_eq!(files[1][2].get_step(), 100);
}

/// tensorflow/tensorboard#3732: steps 0 to 150, resumed at 100 and gone on with to 200. Read in the
/// order of the files, where a session that starts takes back every step from its own on, each step
/// is there once.
#[test]
fn k27_each_step_of_a_resumed_run_is_read_once() {
    let folder = tempfile::tempdir().unwrap();
    let session = |mut writer: Writer, steps: std::ops::RangeInclusive<u64>, value| {
        for step in steps {
            writer.scalars(Step::new(step), 0.0, &[scalar("a", value)]).unwrap();
        }
        writer.flush().unwrap();
    };
    session(Writer::create(folder.path(), &NAME, 0.0).unwrap(), 0..=150, 1.0);
    let later = FileName { n: 1, ..NAME };
    session(Writer::resume(folder.path(), &later, 9.0, Step::new(100)).unwrap(), 100..=200, 2.0);

    let mut curve: Vec<(i64, f32)> = Vec::new();
    for events in read(folder.path()) {
        assert_eq!(events[0].get_file_version(), "brain.Event:2");
        for event in &events[1..] {
            if event.get_session_log().get_status() == SessionLog_SessionStatus::START {
                curve.retain(|(step, _)| *step < event.get_step());
                continue;
            }
            curve.push((event.get_step(), event.get_summary().get_value()[0].get_simple_value()));
        }
    }
    let steps: Vec<i64> = curve.iter().map(|(step, _)| *step).collect();
    assert_eq!(steps, (0..=200).collect::<Vec<_>>());
    assert_eq!(curve.iter().filter(|(_, value)| *value == 2.0).count(), 101);
}

#[test]
fn the_same_calls_give_the_same_bytes() {
    let run = || {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = Writer::create(folder.path(), &NAME, 0.0).unwrap();
        let settings: Vec<_> = (0..20).map(|i| (format!("key.{i}"), json!(i))).collect();
        writer.session_start(0.0, "run", &settings, &["gap/logp_abs_diff_max"]).unwrap();
        writer.layout(0.0, GAP_FIRST).unwrap();
        writer.histogram(Step::new(1), 1.0, "h", "", &[0.0, 1.0]).unwrap();
        writer.session_end(2.0, SessionEnd::Success).unwrap();
        writer.buffer
    };
    assert_eq!(run(), run());
}
