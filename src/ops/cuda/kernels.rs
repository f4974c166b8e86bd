//! The kernels by name, each in the fat binary of its file.

/// Lists the kernels of each file of `kernels/` once: as an enum, its names and its binaries.
macro_rules! kernels {
    ($($file:literal: $($name:ident)*;)*) => {
        /// A kernel, by its name in the source.
        #[allow(non_camel_case_types)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Kernel {
            $($($name,)*)*
        }

        /// Each file's fat binary and the names of its kernels, in the order of [`Kernel`].
        pub(super) const FILES: &[(&[u8], &[&str])] = &[
            $((
                include_bytes!(concat!(env!("OUT_DIR"), "/", $file, ".fatbin")),
                &[$(stringify!($name),)*],
            ),)*
        ];
    };
}

kernels! {
    "conv": conv_forward conv_step conv_advance conv_backward_pre conv_backward_input
        conv_backward_weights;
    "scan": scan_forward_16 scan_forward_any scan_load scan_store;
    "scan_backward": scan_backward_16 scan_backward_any scan_sum_groups scan_sum_spans;
    "state_update": state_update;
    "attention": attention_store attention_forward attention_forward_4;
    "attention_backward": attention_backward_query attention_backward_key;
    "gemm": gemm_forward_f32 gemm_add_bias gemm_input_gradient_f32 gemm_input_gradient_bf16
        gemm_weight_gradient gemm_bias_gradient;
    "gemm_mma": gemm_forward_mma gemm_count_differing;
    "rms_norm": rms_norm_forward rms_norm_three rms_norm_backward_x rms_norm_backward_w;
    "log_softmax": log_softmax_forward log_softmax_backward;
    "sampling": sample_bests sample_masses sample_picks;
    "round": copy_rounded add_rounded;
    "swiglu": swiglu_forward swiglu_backward;
    "rope": rope_forward rope_backward;
    "rows": gather_rows scatter_rows add_weighted_rows scale_rows row_dots add_partials;
    "embedding": embedding_forward embedding_backward;
    "weights": weights_widen weights_widen_transposed weights_narrow weights_decays;
    "adamw": adamw_update adamw_squared_norms;
    "fingerprint": fingerprint_sum;
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use super::*;

    /// Both ways: a kernel that nobody lists cannot be launched, and a listed one that is not there
    /// would be found only on a machine with a GPU.
    #[test]
    fn the_list_and_the_sources_name_the_same_kernels() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
        // Launch bounds may stand between the words and the name.
        let pattern = r#"extern "C" __global__ void\s+(?:__launch_bounds__\([^)]*\)\s+)?(\w+)\("#;
        let pattern = regex::Regex::new(pattern).expect("a pattern");
        let mut found = BTreeSet::new();
        for entry in folder.read_dir().expect("the kernels") {
            let path = entry.expect("a readable folder").path();
            if path.extension().is_some_and(|extension| extension == "cu") {
                let source = std::fs::read_to_string(path).expect("a source");
                found.extend(pattern.captures_iter(&source).map(|found| found[1].to_owned()));
            }
        }
        let listed = FILES.iter().flat_map(|(_, names)| names.iter());
        assert_eq!(found, listed.map(|name| (*name).to_owned()).collect());
    }
}
