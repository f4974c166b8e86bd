//! What a run needs of the machine's memory, before any of it is taken.

use anyhow::{ensure, Result};

use crate::config::{Config, Device, Update};
use crate::model::Plan;

/// Bytes of a run's long-lived arrays, the engine's block pool aside.
pub(super) struct MemoryPlan {
    /// What each part is, and its bytes.
    pub parts: Vec<(&'static str, u64)>,
}

impl MemoryPlan {
    pub(super) fn of(plan: &Plan, config: &Config) -> Self {
        let params = plan.num_parameters();
        let compute = params * config.model.dtype.bytes();
        let mut parts = vec![("master weights", params * 4), ("weights handed over", compute)];
        if config.engine.device == Device::Cuda {
            // Master and moments that are updated lie on the device, and so does the engine.
            return Self { parts };
        }
        // On the CPU packed weights are f32 whatever the compute dtype.
        parts.push(("engine weights", params * 4));
        if config.trainer.update == Update::Adamw {
            parts.push(("optimizer", params * 8));
            parts.push(("gradient", params * 4));
        }
        if config.trainer.kl_coef > 0.0 {
            parts.push(("reference weights", compute));
        }
        Self { parts }
    }

    fn total(&self) -> u64 {
        self.parts.iter().map(|(_, bytes)| bytes).sum()
    }

    /// # Errors
    /// A machine that says it has less memory available. One that does not say is believed.
    pub(super) fn check(&self) -> Result<()> {
        let Some(available) = available_bytes() else { return Ok(()) };
        let needed = self.total();
        ensure!(
            needed <= available,
            "the model needs {needed} bytes of memory before the block pool, and {available} are \
             available: choose a smaller model, or trainer.update = \"none\""
        );
        Ok(())
    }
}

/// Linux's own estimate of what can be taken without swapping.
pub(super) fn available_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config;
    use crate::model::Preset;

    #[test]
    fn a_model_that_no_machine_holds_is_refused_with_both_numbers() {
        let text = "name = \"x\"\nmodel.preset = \"tiny-jamba\"\ntrainer.kl_coef = 0.1\n";
        let config = config::parse(text, "test.toml", &[]).expect("a valid config");
        let tiny = MemoryPlan::of(&Plan::new(Preset::TinyJamba.config()), &config);
        // 4 + 4 + 4 + 8 + 4 + 4 bytes a parameter.
        assert_eq!(tiny.total(), 241_964 * 28);
        tiny.check().expect("7 MB are there");
        let plan = MemoryPlan { parts: vec![("master weights", u64::MAX)] };
        let message = plan.check().expect_err("16 EiB are not").to_string();
        assert!(message.starts_with("the model needs 18446744073709551615 bytes"), "{message}");
    }
}
