//! `gapscope bench`: how fast each verb of the loop is, beside the least time that it can take.
//!
//! Rates are wall clock, the median over the experiment's steps but the first, which warms up. A
//! floor is arithmetic on what the machine was measured to do: see [`floor`].

mod floor;
mod gather;
mod machine;
mod products;
mod timed;

use std::fmt::Write;
use std::path::PathBuf;

use anyhow::{ensure, Result};

use self::floor::Work;
use self::gather::Gather;
use self::machine::Machine;
use self::timed::{Rate, Timed};
use super::recorder::Recorder;
use super::session::Session;
use super::sweep::{refuse_swept, SweepFile};
use super::{device, parts, told};
use crate::base::Step;
use crate::config::{self, Config, Update};
use crate::report::RunFolder;

/// Times the loop's verbs on an experiment, or on each point of its sweep, or on those named in
/// `only`; `show` gets the text of each as soon as it is there.
///
/// # Errors
/// As the run itself, a name that no point has, a swept key among the file's overrides; a point
/// that fails is shown with its error, and the others go on.
pub fn bench(
    file: SweepFile,
    only: &[String],
    mut show: impl FnMut(&str) -> Result<()>,
) -> Result<()> {
    let base = config::load(file.path, file.set)?;
    let Some(sweep) = &base.sweep else {
        ensure!(only.is_empty(), "{} has no [sweep], of which --only is", file.path.display());
        return show(&format!("# {}\n{}", base.name, measured(&base)?.to_text()?));
    };
    refuse_swept(file.set, &sweep.keys())?;
    let mut points = sweep.settings()?;
    for name in only {
        let known = || points.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(", ");
        ensure!(points.iter().any(|(point, _)| point == name), "no point {name}: {}", known());
    }
    points.retain(|(name, _)| only.is_empty() || only.contains(name));
    let mut failed = 0;
    for (name, settings) in &points {
        let set = [file.set, &config::overrides(settings)].concat();
        let text = config::load(file.path, &set).map_err(anyhow::Error::from);
        let text = text.and_then(|config| measured(&config)?.to_text());
        failed += usize::from(text.is_err());
        let text = text.unwrap_or_else(|error| format!("error: {}\n", told(&error)));
        show(&format!("# {} {name}\n{text}\n", base.name))?;
    }
    ensure!(
        failed == 0,
        "{failed} of {} points failed: each error is under its name",
        points.len()
    );
    Ok(())
}

/// Times the products of the experiment's model alone.
///
/// # Errors
/// A model or a device that is not there.
pub fn bench_products(config: &Config) -> Result<String> {
    let plan = parts::plan(config)?;
    device::guarded(|| products::table(&device::open(config.engine.device)?, &plan, config))
}

/// What an experiment took.
struct Measured {
    work: Work,
    machine: Machine,
    trains: bool,
    steps: Vec<Timed>,
    gather: Option<Gather>,
}

fn measured(config: &Config) -> Result<Measured> {
    ensure!(
        config.engine.servers.is_none(),
        "bench times what is in this binary: set engine.kind = \"embedded\""
    );
    ensure!(
        config.steps >= 2,
        "bench warms up with the first step and times the others: steps = {} leaves none",
        config.steps
    );
    device::guarded(|| {
        let machine = Machine::measure(&device::open(config.engine.device)?, config.model.dtype);
        let mut session = Session::open(config)?;
        session.warm_start(|_, _| Ok(()))?;
        let work = Work::of(&session.plan, &session.num);
        let (scratch, mut steps) = (Scratch::of(&config.name), Vec::new());
        let folder = RunFolder::create(&scratch.0)?;
        let claim = folder.claim(&config.to_json())?;
        let mut recorder = Recorder::create((folder, claim), &session, true)?;
        for step in (1..=config.steps).map(Step::new) {
            steps.push(Timed::take(&mut session, &mut recorder, &work, step)?);
        }
        recorder.finish(&session, Ok(()))?;
        let gather = Gather::of(&session)?;
        let trains = config.trainer.update == Update::Adamw;
        Ok(Measured { work, machine, trains, steps: steps.split_off(1), gather })
    })
}

/// A folder for the records of a run that nobody keeps.
struct Scratch(PathBuf);

impl Scratch {
    fn of(name: &str) -> Self {
        let process = std::process::id();
        Self(std::env::temp_dir().join(format!("gapscope-bench-{process}-{name}")))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // A folder that stays behind harms nobody.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

impl Measured {
    fn to_text(&self) -> Result<String> {
        let mut text = String::new();
        writeln!(text, "machine     {}", self.machine)?;
        let Timed { requests, sampled, tokens, .. } = self.steps[0];
        let each = |tokens: u64| tokens as f64 / requests as f64;
        let (prompt, new) = (each(tokens - sampled), each(sampled));
        writeln!(text, "requests    {requests} a step, {prompt} + {new} tokens on average")?;
        let engines = self.steps[0].engine.iter().map(|step| step.engine).max();
        if let Some(last) = engines.filter(|last| last.get() > 0) {
            let engines = last.get() + 1;
            writeln!(
                text,
                "engines     {engines}, of one of which decode, prefill and host work are"
            )?;
        }
        write!(text, "{}", self.work)?;
        self.write_rates(&mut text)?;
        self.write_host_work(&mut text)?;
        if let Some(gather) = &self.gather {
            writeln!(text, "{gather}")?;
        }
        self.write_parts(&mut text)?;
        Ok(text)
    }

    fn write_rates(&self, text: &mut String) -> Result<()> {
        let (work, machine) = (&self.work, &self.machine);
        let full = self.steps[0].full_decodes().first().map_or(0, |step| step.decodes);
        let sampled = "sampled tokens/s";
        let mut row = |name: &str, rate: Option<Rate>, unit: &str, how: &str| -> Result<()> {
            let Some(Rate { per_s, floor }) = rate else { return Ok(()) };
            let share = 100.0 * per_s / floor;
            let how = format!("{share:.1}% of the floor's {floor:.0}{how}");
            Ok(writeln!(text, "{name:<12}{per_s:>9.0} {unit:<18}{how}")?)
        };
        let decodes = format!(", steps of {full} decodes alone");
        row("decode", self.median_of(|s| s.decode(work, machine)), sampled, &decodes)?;
        let prefills = ", steps of prefills alone";
        row("prefill", self.median_of(|s| s.prefill(work, machine)), "tokens/s", prefills)?;
        row("generate", self.median_of(|s| Some(s.generate(work, machine))), sampled, "")?;
        row("score", self.median_of(|s| Some(s.score(work, machine))), "tokens/s", "")?;
        if self.trains {
            row("train", self.median_of(|s| Some(s.train(work, machine))), "tokens/s", "")?;
        }
        Ok(())
    }

    fn median_of(&self, rate: impl Fn(&Timed) -> Option<Rate>) -> Option<Rate> {
        let rates: Vec<Rate> = self.steps.iter().filter_map(rate).collect();
        middle(rates, |rate| rate.per_s)
    }

    /// Of one engine step that holds decodes alone, where there is one.
    fn write_host_work(&self, text: &mut String) -> Result<()> {
        let steps = || self.steps.iter().flat_map(Timed::full_decodes);
        let build = middle(steps().map(|step| step.build_s).collect(), |s| *s);
        let update = middle(steps().map(|step| step.update_s).collect(), |s| *s);
        let (Some(build), Some(update)) = (build, update) else { return Ok(()) };
        let (build, update) = (build * 1e6, update * 1e6);
        let both = build + update;
        writeln!(
            text,
            "host work   {both:>9.0} us a step         schedule and build {build:.0}, \
             update {update:.0}"
        )?;
        Ok(())
    }

    /// Seconds of one step of the loop.
    fn write_parts(&self, text: &mut String) -> Result<()> {
        let part = |of: fn(&Timed) -> f64| {
            middle(self.steps.iter().map(of).collect(), |s| *s).expect("a step was timed")
        };
        let score = part(|step| step.parts.score);
        let mut parts = vec![
            ("generate", part(|step| step.parts.generate)),
            ("score", score),
            ("check", part(|step| step.parts.check)),
        ];
        if self.trains {
            parts.push(("train", part(|step| step.parts.train)));
            parts.push(("hand over", part(|step| step.parts.hand_over)));
        }
        let all: f64 = parts.iter().map(|(_, seconds)| seconds).sum();
        writeln!(text, "one step    {all:>9.3} s")?;
        for (name, seconds) in parts {
            let mut how = format!("{:.1}%", 100.0 * seconds / all);
            if name == "check" {
                write!(how, ", {:.1}% over the score", 100.0 * seconds / score)?;
            }
            writeln!(text, "  {name:<10}{seconds:>9.3} s                 {how}")?;
        }
        Ok(())
    }
}

/// By `key`; `None` of none.
fn middle<T: Copy>(mut all: Vec<T>, key: impl Fn(&T) -> f64) -> Option<T> {
    all.sort_by(|a, b| key(a).total_cmp(&key(b)));
    all.get(all.len() / 2).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 12 requests of which 4 run together, their prompts in one step each time.
    const SMALL: &str = "
        name = \"bench-test\"
        steps = 3
        [model]
        preset = \"tiny-jamba\"
        [engine]
        num_gpu_blocks_override = 100
        max_num_batched_tokens = 64
        max_num_seqs = 4
        max_model_len = 32
        [rollout]
        prompts_per_step = 3
        rollouts_per_prompt = 4
        max_new_tokens = 6
        ignore_eos = true
        [task]
        kind = \"arithmetic\"
        prompt_tokens = 10
    ";

    #[test]
    fn steps_of_the_engine_are_told_apart() {
        let config = config::parse(SMALL, "test.toml", &[]).expect("a valid config");
        let found = measured(&config).expect("it runs");
        assert_eq!(found.steps.len(), 2, "the first step warms up");
        for timed in &found.steps {
            // Three waves of four requests: a prefill samples the first token, five decodes the
            // rest.
            let decodes: Vec<usize> = timed.engine.iter().map(|step| step.decodes).collect();
            assert_eq!(decodes, [0, 4, 4, 4, 4, 4].repeat(3));
            assert_eq!(timed.full_decodes().len(), 15);
            let prefills = timed.engine.iter().filter(|step| step.prefills > 0);
            assert!(prefills.clone().all(|step| step.load.tokens == 40 && step.load.logits == 4));
            assert_eq!(prefills.count(), 3);
        }
        let text = found.to_text().expect("it writes");
        let first = |line: &str| line.split_whitespace().next().map(str::to_owned);
        let rows: Vec<String> = text.lines().filter_map(first).collect();
        let expected = [
            "machine", "requests", "a", "a", "decode", "prefill", "generate", "score", "train",
            "host", "one", "generate", "score", "check", "train", "hand",
        ];
        assert_eq!(rows, expected, "{text}");
    }

    #[test]
    fn several_engines_are_timed_each_by_itself() {
        let set = ["name=bench-engines", "engine.replicas=2"].map(str::to_owned);
        let config = config::parse(SMALL, "test.toml", &set).expect("a valid config");
        let found = measured(&config).expect("it runs");
        for timed in &found.steps {
            // Two waves of four requests for the prompts 0 and 2, one for prompt 1.
            for (engine, waves) in [(0, 2), (1, 1)] {
                let own = timed.engine.iter().filter(|step| step.engine.get() == engine);
                let decodes: Vec<usize> = own.map(|step| step.decodes).collect();
                assert_eq!(decodes, [0, 4, 4, 4, 4, 4].repeat(waves));
            }
        }
        let text = found.to_text().expect("it writes");
        assert!(text.contains("\nengines     2, of one of which decode"), "{text}");
    }

    #[test]
    fn ranks_are_gathered() {
        let set = ["name=bench-ranks", "trainer.ranks=2"].map(str::to_owned);
        let config = config::parse(SMALL, "test.toml", &set).expect("a valid config");
        let text = measured(&config).expect("it runs").to_text().expect("it writes");
        assert!(text.contains("\ngather "), "{text}");
    }

    #[test]
    fn without_updates_nothing_is_trained_or_handed_over() {
        let set = ["name=scores", "trainer.update=none", "rollout.max_new_tokens=1"];
        let set = set.map(str::to_owned);
        let config = config::parse(SMALL, "test.toml", &set).expect("a valid config");
        let found = measured(&config).expect("it runs");
        assert!(found.steps.iter().all(|timed| timed.full_decodes().is_empty()));
        let text = found.to_text().expect("it writes");
        for absent in ["decode ", "train ", "hand over ", "host work "] {
            assert!(!text.contains(absent), "{absent}: {text}");
        }
    }

    #[test]
    fn each_point_is_shown_and_one_that_fails_says_why() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("x.toml");
        let points = "[sweep]\npoints = [{ engine.max_num_seqs = 2 }, { steps = 1 }]\n";
        std::fs::write(&path, format!("{SMALL}\n{points}")).expect("written");
        let run = |set: &[String], only: &[String]| {
            let mut shown = String::new();
            let show = |text: &str| {
                shown += text;
                Ok(())
            };
            let done = bench(SweepFile { path: &path, set }, only, show);
            (shown, done.expect_err("a point fails or is not there").to_string())
        };
        let set = |text: &str| vec![text.to_owned()];

        let (shown, error) = run(&set("name=bench-points"), &[]);
        assert!(shown.starts_with("# bench-points max_num_seqs=2\nmachine "), "{shown}");
        let refused = "\n# bench-points steps=1\nerror: bench warms up with the first step";
        assert!(shown.contains(refused), "{shown}");
        assert_eq!(error, "1 of 2 points failed: each error is under its name");

        let (shown, error) = run(&[], &set("steps=3"));
        let known = "no point steps=3: max_num_seqs=2, steps=1";
        assert_eq!((shown.as_str(), error.as_str()), ("", known));

        let (_, error) = run(&set("steps=4"), &[]);
        assert!(error.starts_with("--set steps=4: the sweep sets this key"), "{error}");
    }

    #[test]
    fn nothing_is_left_to_time_after_the_warm_up() {
        let config = config::parse(SMALL, "test.toml", &["steps=1".to_owned()]);
        let error = measured(&config.expect("a valid config")).err().expect("refused");
        let expected = "bench warms up with the first step and times the others: steps = 1 leaves \
            none";
        assert_eq!(error.to_string(), expected);
    }
}
