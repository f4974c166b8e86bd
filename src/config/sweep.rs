//! `[sweep]`: values to try, and the points that they make.

use std::collections::HashSet;

use toml::Value;

use super::error::ConfigError;

/// More points than a person looks at, and than a mistyped product should start.
pub const MAX_SWEEP_POINTS: usize = 1000;
/// A longer name is no good name of a folder.
const NAME_BYTES_MAX: usize = 120;

/// What `[sweep]` asks for: every point with every combination of the axes' values.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sweep {
    /// Key and values to try, in the order of the file.
    pub axes: Vec<(String, Vec<Value>)>,
    pub points: Vec<SweepSettings>,
    /// Ends a point's run after this many spike steps.
    pub stop_after_spikes: Option<u64>,
}

/// One point: every key that it sets, with its value, in the order of the file.
pub type SweepSettings = Vec<(String, Value)>;

impl Sweep {
    /// The keys that vary: those of the points, then the axes.
    #[must_use]
    pub fn keys(&self) -> Vec<String> {
        let mut keys: Vec<String> = Vec::new();
        let axes = self.axes.iter().map(|(key, _)| key);
        for key in self.points.iter().flatten().map(|(key, _)| key).chain(axes) {
            if !keys.contains(key) {
                keys.push(key.clone());
            }
        }
        keys
    }

    /// All points, each with a name of its own: the last axis varies fastest.
    ///
    /// # Errors
    /// More than [`MAX_SWEEP_POINTS`], a point twice, or a key in a point and as an axis.
    pub fn settings(&self) -> Result<Vec<(String, SweepSettings)>, ConfigError> {
        let refuse = |why: String| Err(ConfigError::Sweep { why });
        let in_points = |key: &String| self.points.iter().flatten().any(|(other, _)| other == key);
        if let Some((key, _)) = self.axes.iter().find(|(key, _)| in_points(key)) {
            return refuse(format!("sets {key} in its points and as an axis: drop one of them"));
        }
        let lengths = self.axes.iter().map(|(_, values)| values.len() as u128);
        let count = lengths.fold(self.points.len().max(1) as u128, u128::saturating_mul);
        if count > MAX_SWEEP_POINTS as u128 {
            return refuse(format!("makes {count} points, the limit is {MAX_SWEEP_POINTS}"));
        }
        let all = self.product();
        let short = self.short_names();
        let mut points: Vec<(String, SweepSettings)> = Vec::new();
        for (index, settings) in all.into_iter().enumerate() {
            let mut name = name(&settings, short, index);
            if points.iter().any(|(_, earlier)| *earlier == settings) {
                return refuse(format!("has the point {name} twice"));
            }
            // What a folder's name cannot hold may be all that tells two points apart.
            if points.iter().any(|(earlier, _)| *earlier == name) {
                name = numbered(index);
            }
            points.push((name, settings));
        }
        Ok(points)
    }

    fn product(&self) -> Vec<SweepSettings> {
        let mut points = self.points.clone();
        if points.is_empty() {
            points.push(Vec::new());
        }
        for (key, values) in &self.axes {
            let with = |point: &SweepSettings, value: &Value| {
                [point.as_slice(), &[(key.clone(), value.clone())]].concat()
            };
            let each = |point: SweepSettings| {
                values.iter().map(|value| with(&point, value)).collect::<Vec<_>>()
            };
            points = points.into_iter().flat_map(each).collect();
        }
        points
    }

    /// Whether the last part of each key is enough to tell it from the others.
    fn short_names(&self) -> bool {
        let keys = self.keys();
        let parts: HashSet<&str> = keys.iter().map(|key| last_part(key)).collect();
        parts.len() == keys.len()
    }
}

/// `KEY=VALUE` for each key, as after `--set`.
#[must_use]
pub fn overrides(settings: &SweepSettings) -> Vec<String> {
    settings.iter().map(|(key, value)| format!("{key}={value}")).collect()
}

/// `rollouts_per_prompt=8,gpu_memory_utilization=0.9`, fit to name a folder.
fn name(settings: &SweepSettings, short: bool, index: usize) -> String {
    let one = |(key, value): &(String, Value)| {
        let key = if short { last_part(key) } else { key };
        let value = match value {
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        format!("{key}={value}")
    };
    let name = settings.iter().map(one).collect::<Vec<_>>().join(",");
    let plain = |c: char| c.is_ascii_alphanumeric() || "=,._+-".contains(c);
    let name: String = name.chars().map(|c| if plain(c) { c } else { '_' }).collect();
    match name.len() {
        0 => "as_written".to_owned(),
        len if len > NAME_BYTES_MAX => numbered(index),
        _ => name,
    }
}

fn numbered(index: usize) -> String {
    format!("point-{:03}", index + 1)
}

fn last_part(key: &str) -> &str {
    key.rsplit('.').next().unwrap_or(key)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{self, TaskConfig};

    fn settings(sweep: &str) -> Result<Vec<(String, SweepSettings)>, String> {
        let text = format!("name = \"x\"\nmodel.preset = \"tiny-jamba\"\n[sweep]\n{sweep}\n");
        let config = config::parse(&text, "x.toml", &[]).map_err(|error| error.to_string())?;
        Ok(config.sweep.expect("a sweep").settings().expect("checked when it was loaded"))
    }

    fn names(sweep: &str) -> Vec<String> {
        settings(sweep).expect("a sweep").into_iter().map(|(name, _)| name).collect()
    }

    #[test]
    fn points_times_axes_with_the_last_axis_fastest() {
        let axes = "rollout.rollouts_per_prompt = [8, 128]\n\"engine.free_list\" = [\"lifo\"]\n\
            engine.gpu_memory_utilization = [0.9, 0.2]";
        let expected = [
            "rollouts_per_prompt=8,free_list=lifo,gpu_memory_utilization=0.9",
            "rollouts_per_prompt=8,free_list=lifo,gpu_memory_utilization=0.2",
            "rollouts_per_prompt=128,free_list=lifo,gpu_memory_utilization=0.9",
            "rollouts_per_prompt=128,free_list=lifo,gpu_memory_utilization=0.2",
        ];
        assert_eq!(names(axes), expected);
        let both = "steps = [1, 2]\npoints = [{ seed = 3 }, { seed = 4, task.operators = \"*\" }]";
        let expected = [
            "seed=3,steps=1",
            "seed=3,steps=2",
            "seed=4,operators=_,steps=1",
            "seed=4,operators=_,steps=2",
        ];
        assert_eq!(names(both), expected);
        assert_eq!(names("points = [{}, { steps = 2 }]"), ["as_written", "steps=2"]);
        let long = format!("name = [\"x\", \"{}\"]", "y".repeat(200));
        assert_eq!(names(&long), ["name=x", "point-002"]);
        assert_eq!(
            names("task.operators = [\"*\", \"+\", \"-*\"]"),
            ["operators=_", "operators=+", "operators=-_"]
        );
        let alike =
            "task.kind = [\"jsonl\"]\ntask.path = [\"a/b\", \"a_b\"]\ntask.answer_key = [\"a\"]";
        assert_eq!(names(alike)[1], "point-002");
    }

    /// Two keys that end in the same word are told apart.
    #[test]
    fn names_are_as_long_as_they_must_be() {
        let same = "trainer.learning_rate = [0.1]\ntrainer.warm_start.learning_rate = [0.2]";
        let expected = ["trainer.learning_rate=0.1,trainer.warm_start.learning_rate=0.2"];
        assert_eq!(names(same), expected);
    }

    #[test]
    fn a_point_overrides_as_set_does() {
        let points = settings("task.operators = [\"*-\"]\ntrainer.betas = [[0.5, 0.25]]").unwrap();
        let set = overrides(&points[0].1);
        let text = "name = \"x\"\nmodel.preset = \"tiny-jamba\"\n";
        let config = config::parse(text, "x.toml", &set).expect("a point is a valid setting");
        assert_eq!(config.trainer.betas, [0.5, 0.25]);
        let task = TaskConfig::Arithmetic {
            max_operand: 9,
            operators: "*-".to_owned(),
            examples: 0,
            prompt_tokens: None,
            min_prompt_tokens: None,
        };
        assert_eq!(config.task, task);
    }

    #[test]
    fn what_makes_no_sweep_is_said() {
        let thousand = (1..=101).map(|n| n.to_string()).collect::<Vec<_>>().join(", ");
        let big = format!("steps = [{thousand}]\nseed = [{}]", "1, 2, 3, 4, 5, 6, 7, 8, 9, 10");
        for (sweep, expected) in [
            ("steps = [8, 8]", "[sweep] has the point steps=8 twice"),
            (
                "steps = [8]\npoints = [{ steps = 2 }]",
                "[sweep] sets steps in its points and as an axis: drop one of them",
            ),
            (big.as_str(), "[sweep] makes 1010 points, the limit is 1000"),
        ] {
            assert_eq!(settings(sweep).unwrap_err(), expected);
        }
    }
}
