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
    "conv": conv_forward conv_advance conv_backward_pre conv_backward_input conv_backward_weights;
    "scan": scan_forward_16 scan_forward_any scan_backward_16 scan_backward_any scan_sum_channels
        scan_sum_rows scan_backward_weights;
    "attention": attention_store_f32 attention_store_bf16 attention_paged_f32 attention_paged_bf16
        attention_own attention_backward_query attention_backward_key;
    "gemm": gemm_forward_f32 gemm_finish gemm_input_gradient_f32 gemm_input_gradient_bf16
        gemm_weight_gradient gemm_bias_gradient;
    "gemm_mma": gemm_forward_mma gemm_to_bf16;
    "rms_norm": rms_norm_forward rms_norm_backward_x rms_norm_backward_w;
    "log_softmax": log_softmax_forward log_softmax_backward;
    "sampling": sample_rows;
}
