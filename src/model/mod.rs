//! HF configs, weights and the blocks: attention, mamba, mlp.
