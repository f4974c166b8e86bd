//! Under the `cuda` feature: compiles `kernels/*.cu` with nvcc into one fat binary a file, which
//! the library embeds.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Compute capabilities to make machine code for, unless GAPSCOPE_CUDA_ARCHS says otherwise; the
/// lowest also as PTX, which newer devices' drivers compile.
const ARCHITECTURES: &str = "80,90";

/// Multiply and add are rounded apart but where a kernel fuses them itself, division and square root
/// as IEEE 754 has them: the CPU's bits.
const NUMERICS: [&str; 4] = ["-fmad=false", "-prec-div=true", "-prec-sqrt=true", "-ftz=false"];

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return;
    }
    for variable in ["NVCC", "CUDA_HOME", "GAPSCOPE_CUDA_ARCHS"] {
        println!("cargo::rerun-if-env-changed={variable}");
    }
    println!("cargo::rerun-if-changed=kernels");
    let architectures =
        env::var("GAPSCOPE_CUDA_ARCHS").unwrap_or_else(|_| ARCHITECTURES.to_owned());
    println!("cargo::rustc-env=GAPSCOPE_CUDA_ARCHS={architectures}");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let targets = targets(&architectures);
    let files = std::fs::read_dir("kernels").expect("the folder `kernels` beside Cargo.toml");
    for file in files {
        let path = file.expect("a readable entry of `kernels`").path();
        if path.extension().is_some_and(|extension| extension == "cu") {
            let name = path.file_stem().expect("a .cu file has a name");
            compile(&path, &out.join(name).with_extension("fatbin"), &targets);
        }
    }
}

/// nvcc's options for "80,90": machine code for each, PTX for the lowest.
fn targets(architectures: &str) -> Vec<String> {
    let number = |one: &str| {
        let one = one.trim();
        one.parse::<u32>().unwrap_or_else(|_| {
            panic!("GAPSCOPE_CUDA_ARCHS holds `{one}`: give compute capabilities such as 80,90")
        })
    };
    let mut all: Vec<u32> = architectures.split(',').map(number).collect();
    all.sort_unstable();
    let code = |arch: &u32| format!("-gencode=arch=compute_{arch},code=sm_{arch}");
    let ptx = all.first().map(|arch| format!("-gencode=arch=compute_{arch},code=compute_{arch}"));
    all.iter().map(code).chain(ptx).collect()
}

fn compile(source: &Path, fatbin: &Path, targets: &[String]) {
    let nvcc = nvcc();
    let mut command = Command::new(&nvcc);
    command.args(["--fatbin", "-O3", "-std=c++17", "-Ikernels"]).args(NUMERICS).args(targets);
    command.arg(source).arg("-o").arg(fatbin);
    let status = command.status().unwrap_or_else(|error| {
        panic!(
            "the feature `cuda` needs nvcc, and `{}` does not start ({error}): set NVCC or \
             CUDA_HOME, or build without `--features cuda`",
            nvcc.display()
        )
    });
    assert!(status.success(), "nvcc failed on {}: see its message above", source.display());
}

fn nvcc() -> PathBuf {
    let in_home = || env::var_os("CUDA_HOME").map(|home| Path::new(&home).join("bin/nvcc"));
    env::var_os("NVCC").map(PathBuf::from).or_else(in_home).unwrap_or_else(|| "nvcc".into())
}
