//! Tensors by the names of Jamba's first checkpoints.

use std::fs;
use std::path::Path;

use gapscope::model::load_master;

use crate::common::fixture;
use crate::{bits, copy, read, write, Tensors};

/// As Jamba's first checkpoints spell them: dense layers are mixtures of one.
fn older_names(folder: &Path) {
    let dense = |name: &str| !read(folder).contains_key(&format!("{name}router.weight"));
    let older = |(name, tensor): (String, _)| {
        let Some((layer, rest)) = name.split_once("feed_forward.") else {
            let name = name.replace("pre_ff_layernorm", "pre_moe_layernorm");
            let name = name.replace("b_layernorm", "B_layernorm");
            return (name.replace("c_layernorm", "C_layernorm"), tensor);
        };
        let one = if dense(&format!("{layer}feed_forward.")) { "experts.0." } else { "" };
        (format!("{layer}moe.{one}{rest}"), tensor)
    };
    let tensors: Tensors = read(folder).into_iter().map(older).collect();
    write(folder, &tensors);
}

#[test]
fn the_names_of_jambas_first_checkpoints_are_read() {
    for (model, some) in [
        ("tiny-jamba", "model.layers.0.moe.experts.0.gate_proj.weight"),
        ("tiny-jamba-moe", "model.layers.1.moe.experts.1.gate_proj.weight"),
    ] {
        let (_parent, folder) = copy();
        for name in ["config.json", "generation_config.json", "model.safetensors"] {
            fs::copy(fixture(model).join(name), folder.join(name)).expect("copied");
        }
        older_names(&folder);
        let names = read(&folder);
        for name in [some, "model.layers.0.pre_moe_layernorm.weight"] {
            assert!(names.contains_key(name), "{name}");
        }
        assert!(names.keys().any(|name| name.ends_with(".mamba.B_layernorm.weight")));
        let (plan, found) = load_master(&folder).expect("older names");
        let (want_plan, want) = load_master(&fixture(model)).expect("the fixture");
        assert_eq!((plan, bits(&found)), (want_plan, bits(&want)));
        // What is wrong is said by the names that the files have.
        let mut tensors = read(&folder);
        tensors.get_mut(some).expect("it is there").1.reverse();
        write(&folder, &tensors);
        let error = load_master(&folder).expect_err("another shape").to_string();
        assert!(error.contains(&format!("tensor {some}: has shape")), "{error}");
    }
}
