//! TOML text and overrides, flattened to dotted keys that are known and values that they take.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;

use serde::de::DeserializeOwned;
use serde::Deserialize;
use toml::de::{DeTable, DeValue, ValueDeserializer};
use toml::{Spanned, Value};

use super::args;
use super::error::{ConfigError, Place};
use super::keys::{find, is_table, table_of, IfAbsent, Key, KEYS};
use super::nearest::nearest_key;
use super::sweep::{Sweep, SweepSettings};

/// What the user wrote, each value accepted by its key, with the defaults behind it.
pub(super) struct Source {
    pub file: String,
    written: BTreeMap<String, Written>,
    /// Keys that `engine.args` set.
    by_args: Vec<&'static str>,
    pub sweep: Option<Sweep>,
}

struct Written {
    value: Value,
    place: Place,
}

/// Reads the file's text, then each override over it.
pub(super) fn read(text: &str, file: &str, overrides: &[String]) -> Result<Source, ConfigError> {
    let (written, by_args) = (BTreeMap::new(), Vec::new());
    let mut source = Source { file: file.to_owned(), written, by_args, sweep: None };
    let reader = Reader { text, file, override_n: None };
    let table = DeTable::parse(text).map_err(|error| reader.syntax(&error))?;
    reader.document(table.into_inner(), &mut source)?;
    for (index, assignment) in overrides.iter().enumerate() {
        read_override(index + 1, assignment, &mut source)?;
    }
    source.read_args()?;
    Ok(source)
}

/// `KEY=VALUE` with a TOML value, or else with the text after `=` as a string.
fn read_override(n: usize, assignment: &str, source: &mut Source) -> Result<(), ConfigError> {
    let Some((key, value)) = assignment.split_once('=') else {
        return Err(ConfigError::Override { n, found: assignment.to_owned() });
    };
    let as_value = format!("{key} = {value}");
    let as_text = format!("{key} = {}", Value::String(value.trim().to_owned()));
    let table = DeTable::parse(&as_value)
        .or_else(|_| DeTable::parse(&as_text))
        .map_err(|_| ConfigError::Override { n, found: assignment.to_owned() })?;
    let reader = Reader { text: "", file: "", override_n: Some(n) };
    reader.document(table.into_inner(), source)
}

impl Source {
    /// The value of a key: as written, or its default; `None` where absence is allowed or is an
    /// error that the caller words.
    ///
    /// # Panics
    /// On a mistake in the key's row: the value's kind was checked when it was read, so it fits.
    pub fn optional<T: DeserializeOwned>(&self, name: &str) -> Option<T> {
        let value = self.value(name)?.into_owned();
        Some(value.try_into().unwrap_or_else(|error| panic!("wrong row of {name}: {error}")))
    }

    /// As [`Self::optional`], for a key with a default.
    pub fn get<T: DeserializeOwned>(&self, name: &str) -> T {
        self.optional(name).unwrap_or_else(|| panic!("{name} has no default"))
    }

    pub fn value(&self, name: &str) -> Option<Cow<'_, Value>> {
        if let Some(written) = self.written.get(name) {
            return Some(Cow::Borrowed(&written.value));
        }
        match find(name).unwrap_or_else(|| panic!("{name} is not in KEYS")).if_absent {
            IfAbsent::Is(text) => Some(Cow::Owned(value_of(text))),
            IfAbsent::Nothing(_) | IfAbsent::Error(_) => None,
        }
    }

    /// The keys that were written, sweep aside.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.written.keys().map(String::as_str)
    }

    /// A key, its value and where it was written, for messages.
    pub fn said(&self, name: &str) -> String {
        let value = self.value(name).map_or_else(|| "nothing".to_owned(), |v| v.to_string());
        let place = self.written.get(name).map(|w| w.place.to_string());
        format!("{name} = {value} ({})", place.as_deref().unwrap_or("the default"))
    }

    /// The keys that `engine.args` set.
    pub fn by_args(&self) -> &[&'static str] {
        &self.by_args
    }

    /// Flags are keys by another name: neither wins over the other.
    fn read_args(&mut self) -> Result<(), ConfigError> {
        for (name, value) in args::keys(self)? {
            let place = self.written["engine.args"].place.clone();
            accept(find(name).expect("flags are keys"), &place, &value)?;
            let values = vec![self.said("engine.args"), self.said(name)];
            if self.written.contains_key(name) {
                let why = format!("both set {name}: drop the one or the other");
                return Err(ConfigError::Conflict { values, why });
            }
            self.written.insert(name.to_owned(), Written { value, place });
            self.by_args.push(name);
        }
        Ok(())
    }

    /// An error about a written value that its kind alone could not find.
    pub fn refuse(&self, name: &str, allowed: String) -> ConfigError {
        let written = &self.written[name];
        refused(&written.place, name, &written.value, allowed)
    }
}

/// TOML text of the table of keys as a value.
pub(super) fn value_of(text: &str) -> Value {
    let value = ValueDeserializer::parse(text).and_then(Value::deserialize);
    value.unwrap_or_else(|error| panic!("KEYS holds TOML values; {text}: {error}"))
}

/// Where a table of keys stands, which decides how its names are read.
#[derive(Clone, Copy, PartialEq)]
enum Scope {
    /// The file itself: a dot inside quotes is no table.
    File,
    /// `[sweep]`: its own keys, and dotted keys quoted or not.
    Sweep,
    /// A point of a sweep: dotted keys quoted or not.
    Point,
}

struct Leaf<'i> {
    key: &'static Key,
    /// Of the value.
    place: Place,
    value: Spanned<DeValue<'i>>,
}

/// One text being read: the file, or one override.
struct Reader<'a> {
    text: &'a str,
    file: &'a str,
    override_n: Option<usize>,
}

impl Reader<'_> {
    fn document(&self, mut table: DeTable<'_>, source: &mut Source) -> Result<(), ConfigError> {
        let sweep = table.remove("sweep");
        for leaf in self.leaves("", table, Scope::File)? {
            let value = self.checked(leaf.key, &leaf.place, leaf.value)?;
            source.written.insert(leaf.key.name.to_owned(), Written { value, place: leaf.place });
        }
        match sweep {
            Some(sweep) => self.sweep(sweep, source.sweep.get_or_insert_default()),
            None => Ok(()),
        }
    }

    /// What is written again takes the place of what was written before.
    fn sweep(&self, sweep: Spanned<DeValue<'_>>, out: &mut Sweep) -> Result<(), ConfigError> {
        let table = self.table("sweep", sweep)?;
        for Leaf { key, place, value } in self.leaves("", table, Scope::Sweep)? {
            match key.name {
                "sweep.points" => out.points = self.points(key, &place, value)?,
                "sweep.stop_after_spikes" => {
                    let spikes = self.checked(key, &place, value)?.as_integer();
                    out.stop_after_spikes = spikes.map(|n| n.unsigned_abs());
                }
                axis => {
                    let values = self.axis(key, &place, value)?;
                    match out.axes.iter_mut().find(|(known, _)| known == axis) {
                        Some(written) => written.1 = values,
                        None => out.axes.push((axis.to_owned(), values)),
                    }
                }
            }
        }
        Ok(())
    }

    /// The values that a sweep tries for one key.
    fn axis(
        &self,
        key: &Key,
        place: &Place,
        value: Spanned<DeValue<'_>>,
    ) -> Result<Vec<Value>, ConfigError> {
        match self.plain(value)? {
            Value::Array(values) if !values.is_empty() => {
                for value in &values {
                    accept(key, place, value)?;
                }
                Ok(values)
            }
            other => {
                let allowed = format!("an array of values, each {}", key.kind.allowed());
                Err(refused(place, &format!("sweep.\"{}\"", key.name), &other, allowed))
            }
        }
    }

    fn points(
        &self,
        key: &Key,
        place: &Place,
        value: Spanned<DeValue<'_>>,
    ) -> Result<Vec<SweepSettings>, ConfigError> {
        self.checked(key, place, value.clone())?;
        let DeValue::Array(points) = value.into_inner() else {
            unreachable!("Kind::Points accepts arrays only");
        };
        let mut out = Vec::new();
        for point in points {
            let mut settings = SweepSettings::new();
            for leaf in self.leaves("", self.table(key.name, point)?, Scope::Point)? {
                let value = self.checked(leaf.key, &leaf.place, leaf.value)?;
                settings.push((leaf.key.name.to_owned(), value));
            }
            out.push(settings);
        }
        Ok(out)
    }

    /// Everything in a table and the tables in it, in the order of the text.
    fn leaves<'i>(
        &self,
        prefix: &str,
        table: DeTable<'i>,
        scope: Scope,
    ) -> Result<Vec<Leaf<'i>>, ConfigError> {
        let mut entries: Vec<_> = table.into_iter().collect();
        entries.sort_by_key(|(key, _)| key.span().start);
        let mut leaves = Vec::new();
        for (key, value) in entries {
            let quoted_dot = key.get_ref().contains('.') && scope == Scope::File;
            let part =
                if quoted_dot { format!("{:?}", key.get_ref()) } else { key.get_ref().to_string() };
            let name = if prefix.is_empty() { part } else { format!("{prefix}.{part}") };
            if let Some(known) = known(&name, scope) {
                leaves.push(Leaf { key: known, place: self.place(value.span()), value });
            } else if is_table(&name) && name != "sweep" {
                leaves.extend(self.leaves(&name, self.table(&name, value)?, scope)?);
            } else {
                let shown =
                    if scope == Scope::Sweep { format!("sweep.{name}") } else { name.clone() };
                let place = self.place(key.span());
                return Err(ConfigError::UnknownKey { place, key: shown, hint: hint(&name) });
            }
        }
        Ok(leaves)
    }

    fn table<'i>(
        &self,
        name: &str,
        value: Spanned<DeValue<'i>>,
    ) -> Result<DeTable<'i>, ConfigError> {
        let place = self.place(value.span());
        match value.into_inner() {
            DeValue::Table(table) => Ok(table),
            other => {
                let value = self.plain(Spanned::new(0..0, other))?;
                Err(refused(&place, name, &value, format!("a table: [{name}]")))
            }
        }
    }

    fn checked(
        &self,
        key: &Key,
        place: &Place,
        value: Spanned<DeValue<'_>>,
    ) -> Result<Value, ConfigError> {
        let value = self.plain(value)?;
        accept(key, place, &value)?;
        Ok(value)
    }

    /// Without spans. Fails only on numbers that TOML's 64 bits do not hold.
    fn plain(&self, value: Spanned<DeValue<'_>>) -> Result<Value, ConfigError> {
        let place = self.place(value.span());
        Value::deserialize(ValueDeserializer::from(value))
            .map_err(|_| ConfigError::Syntax { place, message: "a number over 64 bits".to_owned() })
    }

    fn syntax(&self, error: &toml::de::Error) -> ConfigError {
        let end = self.text.len();
        let place = self.place(error.span().unwrap_or(end..end));
        ConfigError::Syntax { place, message: error.message().replace('\n', "; ") }
    }

    fn place(&self, span: Range<usize>) -> Place {
        if let Some(n) = self.override_n {
            return Place::Override(n);
        }
        let before = self.text.get(..span.start).unwrap_or(self.text);
        let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
        Place::File {
            file: self.file.to_owned(),
            line: before.matches('\n').count() + 1,
            column: before[line_start..].chars().count() + 1,
        }
    }
}

/// The key that a name means in its scope. A sweep does not sweep over itself.
fn known(name: &str, scope: Scope) -> Option<&'static Key> {
    let key = find(name).filter(|key| table_of(key.name) != "sweep");
    match scope {
        Scope::Sweep => key.or_else(|| find(&format!("sweep.{name}"))),
        Scope::File | Scope::Point => key,
    }
}

fn accept(key: &Key, place: &Place, value: &Value) -> Result<(), ConfigError> {
    if key.kind.accepts(value) {
        return Ok(());
    }
    let mut allowed = key.kind.allowed();
    if let Some(nearest) = key.kind.nearest(value) {
        allowed += &format!("; did you mean \"{nearest}\"?");
    }
    Err(refused(place, key.name, value, allowed))
}

fn refused(place: &Place, name: &str, value: &Value, allowed: String) -> ConfigError {
    ConfigError::Value {
        place: place.clone(),
        key: name.to_owned(),
        found: if value.is_table() { "a table".to_owned() } else { value.to_string() },
        allowed,
    }
}

/// The nearest known name, or else what the table takes.
fn hint(name: &str) -> String {
    if let Some(nearest) = nearest_key(name) {
        return format!("did you mean {nearest}?");
    }
    let table = table_of(name);
    let mut parts: Vec<&str> = Vec::new();
    for key in KEYS {
        let rest = if table.is_empty() {
            Some(key.name)
        } else {
            key.name.strip_prefix(table).and_then(|rest| rest.strip_prefix('.'))
        };
        let Some(rest) = rest else { continue };
        let part = rest.split('.').next().expect("split yields at least one part");
        if parts.last() != Some(&part) {
            parts.push(part);
        }
    }
    match table {
        "" => format!("the file takes {}", parts.join(", ")),
        table => format!("[{table}] takes {}", parts.join(", ")),
    }
}
