//! The embedding on the device, forward and backward bit for bit the CPU's (kernels/embedding.cu).

// Launches are raw calls: each wrapper asserts the lengths that its kernels index.
#![allow(unsafe_code)]

use cudarc::driver::{CudaView, CudaViewMut, DevicePtr};

use crate::base::TokenId;
use crate::config::Dtype;
use crate::ops::cuda::{blocks, dtype_code, launch, Floats, Gpu, Kernel, OrFail, THREADS};
use crate::ops::sheet::Numbers;
use crate::ops::weights::cuda::Bytes;

/// x[T, H], `width` being H, from the table `[V, H]`, in `dtype`.
#[must_use]
pub fn forward(table_vh: &Bytes, width: usize, tokens: &Numbers, dtype: Dtype) -> Floats {
    let gpu = table_vh.gpu();
    let x_th = Floats::uninit(gpu, tokens.len() * width, dtype);
    if x_th.is_empty() {
        return x_th;
    }
    let (table, x) = (table_vh.view(), x_th.rows(width));
    let start = table.device_ptr(gpu.stream()).0;
    let even = x.is_even(width) && start.is_multiple_of(16);
    let len = x_th.len() as u64;
    let threads = if even { len / 8 } else { len };
    launch!(gpu, Kernel::embedding_forward, (blocks(threads), 1), THREADS, 0;
        &table, &tokens.address(gpu), &len, &(width as u64), &dtype_code(table_vh.dtype()),
        &u32::from(even), &x);
    x_th
}

/// Adds each row of dx[T, H] to its token's row of `dtable[V, H]`, rows ascending.
pub fn backward(
    gpu: &Gpu,
    width: usize,
    tokens: &[TokenId],
    dx_th: &CudaView<'_, f32>,
    dtable_vh: &mut CudaViewMut<'_, f32>,
) {
    assert_eq!(dx_th.len(), tokens.len() * width, "one row a token");
    if dx_th.is_empty() {
        return;
    }
    let Segments { tokens, ends, rows } = Segments::new(tokens, dtable_vh.len() / width);
    let (unique, width) = (tokens.len() as u32, width as u64);
    let [tokens, ends, rows] = [tokens, ends, rows].map(|numbers| gpu.upload(&numbers));
    let grid = (blocks(u64::from(unique) * width), 1);
    launch!(gpu, Kernel::embedding_backward, grid, THREADS, 0;
        dx_th, &tokens, &ends, &rows, &unique, &width, dtable_vh);
}

/// Rows by token: those of `tokens[u]` end before `rows[ends[u]]`, ascending.
#[derive(Debug, PartialEq)]
struct Segments {
    tokens: Vec<u32>,
    ends: Vec<u32>,
    rows: Vec<u32>,
}

impl Segments {
    fn new(tokens: &[TokenId], vocabulary: usize) -> Self {
        let count = u32::try_from(tokens.len()).expect("a batch has fewer than 2^32 rows");
        let of_row: Vec<u32> = tokens.iter().map(|token| number(*token, vocabulary)).collect();
        let mut rows: Vec<u32> = (0..count).collect();
        // Stable: the rows of one token stay ascending.
        rows.sort_by_key(|&row| of_row[row as usize]);
        let (mut unique, mut ends) = (Vec::new(), Vec::new());
        for (row, end) in rows.iter().zip(1..) {
            let token = of_row[*row as usize];
            match ends.last_mut() {
                Some(last) if unique.last() == Some(&token) => *last = end,
                _ => {
                    unique.push(token);
                    ends.push(end);
                }
            }
        }
        Self { tokens: unique, ends, rows }
    }
}

fn number(token: TokenId, vocabulary: usize) -> u32 {
    assert!(token.index() < vocabulary, "token {token:?} of {vocabulary}");
    token.get()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_one_token_lie_together_and_ascend() {
        let check = |tokens: &[u32], unique: &[u32], ends: &[u32], rows: &[u32]| {
            let tokens: Vec<TokenId> = tokens.iter().map(|&token| TokenId::new(token)).collect();
            let [unique, ends, rows] = [unique, ends, rows].map(<[u32]>::to_vec);
            assert_eq!(Segments::new(&tokens, 10), Segments { tokens: unique, ends, rows });
        };
        check(&[], &[], &[], &[]);
        check(&[7], &[7], &[1], &[0]);
        check(&[3, 1, 3, 9, 1, 3], &[1, 3, 9], &[2, 5, 6], &[1, 4, 0, 2, 5, 3]);
    }
}
