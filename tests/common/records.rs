//! All that a run or a sweep leaves, without time: equal for two that did the same.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use protobuf::Message;
use serde_json::Value;
use tensorboard_proto::event::Event;

/// Each record by the file's path below the root.
pub type Records = BTreeMap<String, String>;

/// Every file by its path below the root. Of `summary.json` all but `wall_s`, of `timing.jsonl` the
/// steps, of each folder of event files what TensorBoard reads in them but `perf/*` and hparams,
/// which hold time. A sweep's own event files, which each process adds to, are left out.
pub fn records(root: &Path) -> Records {
    let mut records = BTreeMap::new();
    collect(root, root, &mut records);
    if root.join("plan.json").is_file() {
        records.remove("tb/events");
    }
    records
}

/// Panics with the name of the first file that differs.
pub fn assert_same_records(found: &Path, expected: &Path) {
    assert_same(&records(found), &records(expected));
}

/// As [`assert_same_records`], of records taken before.
pub fn assert_same(found: &Records, expected: &Records) {
    assert_eq!(found.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());
    for (name, text) in expected {
        assert!(&found[name] == text, "{name} differs");
    }
}

fn collect(root: &Path, folder: &Path, records: &mut Records) {
    let mut paths: Vec<_> = fs::read_dir(folder)
        .expect("a folder")
        .map(|entry| entry.expect("an entry").path())
        .collect();
    paths.sort();
    let mut events = String::new();
    for path in paths {
        if path.is_dir() {
            collect(root, &path, records);
            continue;
        }
        let name = path.strip_prefix(root).expect("below the root").to_str().expect("UTF-8");
        let bytes = fs::read(&path).expect("a file");
        if name.contains("tfevents") {
            events += &what_is_read(&bytes);
            continue;
        }
        let text = match path.file_name().and_then(|name| name.to_str()) {
            Some("summary.json") => without_time(&bytes),
            Some("timing.jsonl") => steps(&bytes),
            _ => format!("{bytes:?}"),
        };
        records.insert(name.to_owned(), text);
    }
    if !events.is_empty() {
        let name = folder.strip_prefix(root).expect("below the root").display();
        records.insert(format!("{name}/events"), events);
    }
}

fn without_time(summary: &[u8]) -> String {
    let mut summary: Value = serde_json::from_slice(summary).expect("a summary");
    assert!(summary["wall_s"].take().is_f64(), "seconds");
    summary.to_string()
}

fn steps(timing: &[u8]) -> String {
    let rows = serde_json::Deserializer::from_slice(timing).into_iter::<Value>();
    rows.map_while(Result::ok).map(|row| format!("{}\n", row["step"])).collect()
}

/// A line a value: step, tag and bytes; up to a torn record.
fn what_is_read(mut file: &[u8]) -> String {
    let mut lines = String::new();
    while let Some(len) = file.first_chunk() {
        let len = u64::from_le_bytes(*len) as usize;
        if file.len() < 16 + len {
            break;
        }
        let event = Event::parse_from_bytes(&file[12..12 + len]).expect("an event");
        for value in event.get_summary().get_value() {
            let (mut value, tag) = (value.clone(), value.get_tag().to_owned());
            if !tag.starts_with("perf/") && !tag.starts_with("_hparams_/") {
                // A tag is described anew in each file.
                value.clear_metadata();
                let bytes = value.write_to_bytes().expect("bytes");
                lines += &format!("{} {tag} {bytes:?}\n", event.get_step());
            }
        }
        file = &file[16 + len..];
    }
    lines
}
