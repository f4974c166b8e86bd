//! The table of keys as a commented experiment file.

use std::fmt::Write;

use super::keys::{last_part, only_with, table_of, IfAbsent, Key, KEYS};
use super::source::value_of;

/// Every key with its meaning, what it takes, its default and its name elsewhere, as a TOML file
/// that loads: keys that have no default, or that mean nothing under the defaults, are comments.
#[must_use]
pub fn defaults_text() -> String {
    let mut out = String::from("# Every key of an experiment file, with its default.\n");
    let mut table = "";
    for key in KEYS {
        if table_of(key.name) != table {
            table = table_of(key.name);
            write!(out, "\n[{table}]").expect("a String takes any text");
        }
        out.push('\n');
        write_key(&mut out, key).expect("a String takes any text");
    }
    out
}

fn write_key(out: &mut String, key: &Key) -> std::fmt::Result {
    writeln!(out, "# {}", key.meaning.replace('\n', "\n# "))?;
    write!(out, "# Takes {}.", key.kind.allowed())?;
    if !key.elsewhere.is_empty() {
        write!(out, " Elsewhere: {}.", key.elsewhere)?;
    }
    let partner = only_with(key.name);
    if let Some((other, value)) = partner {
        write!(out, " Only with {other} = \"{value}\".")?;
    }
    let (text, note) = match key.if_absent {
        IfAbsent::Is(text) => (text, ""),
        IfAbsent::Nothing(text) => (text, " No default."),
        IfAbsent::Error(text) => (text, " Required."),
    };
    let idle = partner.is_some_and(|(other, value)| !holds_by_default(other, value));
    let comment = if idle || matches!(key.if_absent, IfAbsent::Nothing(_)) { "# " } else { "" };
    writeln!(out, "{note}\n{comment}{} = {text}", last_part(key.name))
}

fn holds_by_default(name: &str, value: &str) -> bool {
    let key = super::keys::find(name).expect("partners are keys");
    match key.if_absent {
        IfAbsent::Is(text) => value_of(text).as_str() == Some(value),
        IfAbsent::Nothing(_) | IfAbsent::Error(_) => false,
    }
}
