//! The catalogue of planted faults, as text.

use std::fmt::Write;

use crate::config::{FaultEntry, FAULTS};

const HEAD: [&str; 6] = ["name", "row", "side", "planted by", "symptom", "hidden by"];

/// Every fault that can be planted or imported: a line each, in columns.
#[must_use]
pub fn list_faults() -> String {
    let lines: Vec<[String; 6]> =
        std::iter::once(HEAD.map(str::to_owned)).chain(FAULTS.iter().map(cells)).collect();
    let width = |column: usize| lines.iter().map(|line| line[column].len()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..HEAD.len()).map(width).collect();
    let mut text = String::new();
    for line in &lines {
        let mut shown = String::new();
        for (cell, width) in line.iter().zip(&widths) {
            write!(shown, "{cell:width$}  ").expect("a String takes any text");
        }
        writeln!(text, "{}", shown.trim_end()).expect("a String takes any text");
    }
    text
}

fn cells(entry: &FaultEntry) -> [String; 6] {
    let FaultEntry { name, row, side, symptom, hidden_by, .. } = entry;
    let row = if row.is_empty() { "-" } else { row };
    [name, row, &side.to_string(), &entry.how(), symptom, hidden_by].map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_fault_has_a_line_whose_columns_stand_under_their_heads() {
        let text = list_faults();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 1 + FAULTS.len());
        let at = |name| lines[0].find(name).expect("a head");
        for (line, entry) in lines[1..].iter().zip(FAULTS) {
            assert!(line.starts_with(entry.name), "{line}");
            assert!(line[at("side")..].starts_with(&entry.side.to_string()), "{line}");
            assert!(line[at("planted by")..].starts_with(&entry.how()), "{line}");
            assert!(line[at("symptom")..].starts_with(entry.symptom), "{line}");
            assert_eq!(&line[at("hidden by")..], entry.hidden_by);
        }
    }
}
