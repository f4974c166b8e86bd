//! The model's products alone: each distinct one, at four numbers of rows.

use std::cell::Cell;
use std::fmt::Write;

use anyhow::Result;

use super::machine::{flops_text, queued};
use crate::config::Config;
use crate::model::Plan;
use crate::ops::array::Device;
use crate::ops::ceilings::Product;

/// Rows of activations.
const ROWS: [usize; 4] = [64, 256, 1024, 8192];
/// Copies of a weight together are larger than any cache, as a model's weights are.
const WEIGHTS_BYTES: u64 = 128 << 20;
/// Products of a round: as many as make a few milliseconds of the smallest.
const CALLS: usize = 200;

/// Times each product, called one after another without a graph.
pub(super) fn table(device: &Device, plan: &Plan, config: &Config) -> Result<String> {
    let (dtype, arithmetic) = (config.model.dtype, config.engine.numerics);
    let mut text = String::new();
    for [n, k] in shapes(plan) {
        let copies = WEIGHTS_BYTES.div_ceil((n * k) as u64 * dtype.bytes()) as usize;
        let one = |_| Product::new(device, [n, k], dtype, arithmetic);
        let products: Vec<Product> = (0..copies).map(one).collect();
        for m in ROWS {
            let (rows, next) = (products[0].rows(device, m), Cell::new(0));
            let flops = queued(device, CALLS, || {
                let turn = next.replace(next.get() + 1) % copies;
                products[turn].run(&rows)
            });
            let us = 2.0 * (m * n * k) as f64 / flops * 1e6;
            let (shape, rate) = (format!("{m} x {n} x {k}"), flops_text(flops));
            writeln!(text, "product     {shape:<22}{us:>10.1} us   {rate}")?;
        }
    }
    Ok(text)
}

/// Projections of one input whose weights lie side by side: a GPU makes one product of them.
const JOINED: [&[&str]; 2] = [&["q_proj", "k_proj", "v_proj"], &["gate_proj", "up_proj"]];

/// `[N, K]` of every product of activations by a weight, each once, in the order of the model.
fn shapes(plan: &Plan) -> Vec<[usize; 2]> {
    let looked_up = (!plan.config.tie_word_embeddings).then(|| &plan.units[0].tensors[0].name);
    let mut all: Vec<[usize; 2]> = Vec::new();
    for unit in &plan.units {
        let mut last = None;
        for tensor in &unit.tensors {
            let name =
                tensor.name.strip_suffix(".weight").filter(|_| Some(&tensor.name) != looked_up);
            let module = name.and_then(|name| name.rsplit('.').next());
            let together =
                JOINED.iter().position(|names| module.is_some_and(|m| names.contains(&m)));
            match (&tensor.shape[..], all.last_mut()) {
                ([n, _], Some(shape)) if together.is_some() && together == last => shape[0] += n,
                (&[n, k], _) if name.is_some() => all.push([n, k]),
                _ => {}
            }
            last = together;
        }
    }
    let mut shapes = Vec::new();
    for shape in all {
        if !shapes.contains(&shape) {
            shapes.push(shape);
        }
    }
    shapes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Preset;

    #[test]
    fn each_product_of_jamba_3b_is_listed_once() {
        let shapes = shapes(&Plan::new(Preset::Jamba3bShape.config()));
        let expected = [
            [65536, 2560],
            [10240, 2560],
            [192, 5120],
            [5120, 160],
            [2560, 5120],
            [16384, 2560],
            [2560, 8192],
            [2816, 2560],
            [2560, 2560],
        ];
        assert_eq!(shapes, expected);
    }
}
