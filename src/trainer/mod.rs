//! FSDP units, scoring, GRPO loss, AdamW and the candle reference.
