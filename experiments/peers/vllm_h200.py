#!/usr/bin/env python3
"""Holds gapscope against a real vLLM hybrid on a GPU, as it is and under the rule of before PR 32118.

usage: vllm_h200.py OUT [healthy] [old-rule]

Writes the 3B shape with `gapscope model init`, serves it with vllm_waves.py, runs
experiments/h200/vllm.toml against it, and checks: as vLLM is, no finding; under the old rule every step
from the second on names the request that began with one token, and no other. OUT gets output.txt and
of each run summary.json, findings.json, servers.json, the server's log and the requests that began
with one token. The interpreter must import vllm (PYTHONPATH); $GAPSCOPE is the binary, built with
CUDA (target/release/gapscope); $MODEL is where the 6.4 GB of weights go (/tmp/h200-vllm-model)."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
GAPSCOPE = os.environ.get("GAPSCOPE", str(REPOSITORY / "target/release/gapscope"))
MODEL = Path(os.environ.get("MODEL", "/tmp/h200-vllm-model"))
# vLLM asks for a network interface even on one GPU; nothing is to be looked up anywhere.
ENVIRONMENT = os.environ | {
    "VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0", "PYTHONUNBUFFERED": "1"}


class Run:
    """One run of the experiment under one rule."""

    def __init__(self, out: Path, rule: str) -> None:
        self.out, self.rule = out / rule, rule
        self.imposters = self.out / "imposters.txt"
        self.run = Path("/tmp") / f"h200-vllm-{rule}"
        self.out.mkdir(parents=True, exist_ok=True)
        self.imposters.write_text("")
        shutil.rmtree(self.run, ignore_errors=True)

    def go(self, say) -> dict:
        """The run's summary."""
        server = [sys.executable, str(HERE / "vllm_waves.py"), str(MODEL), "{port}",
                  str(self.imposters), "--mamba-ssm-cache-dtype", "{engine.mamba_ssm_cache_dtype}",
                  *(["--old-rule"] if self.rule == "old-rule" else [])]
        command = [GAPSCOPE, "run", "experiments/h200/vllm.toml", "--out", str(self.run),
                   "--set", f"model.path={MODEL}",
                   "--set", f"engine.launch.command={json.dumps(shlex.join(server))}"]
        say("$ " + shlex.join(command))
        done = subprocess.run(command, cwd=REPOSITORY, env=ENVIRONMENT, text=True, check=False,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        say(done.stdout)
        for name in ["summary.json", "findings.json", "servers.json", "steps.jsonl", "server-0.log"]:
            if (self.run / name).exists():
                shutil.copy(self.run / name, self.out / name)
        if done.returncode != 0:
            raise SystemExit(f"gapscope ended with {done.returncode}")
        return json.loads((self.out / "summary.json").read_text())

    def began_with_one_token(self) -> set[str]:
        """Rollouts of the loop; vLLM and the front have each put a number behind a name."""
        names = re.findall(r"^(s[1-9]\d*\.p\d+\.r\d+)\.\d+", self.imposters.read_text(), re.M)
        return set(names)


def main() -> int:
    if not sys.argv[1:]:
        print(__doc__, file=sys.stderr)
        return 2
    out = Path(sys.argv[1]).resolve()
    out.mkdir(parents=True, exist_ok=True)
    log = (out / "output.txt").open("a", buffering=1)

    def say(text: str) -> None:
        print(text, flush=True)
        log.write(text + "\n")

    gpu = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
                         capture_output=True, text=True, check=False)
    say(f"on {gpu.stdout.strip()}")
    if not (MODEL / "config.json").exists():
        subprocess.run([GAPSCOPE, "model", "init", "jamba-3b-shape", str(MODEL), "--dtype", "bf16"],
                       check=True)
    holds = True
    for rule in sys.argv[2:] or ["healthy", "old-rule"]:
        run = Run(out, rule)
        found = run.go(say)
        named = {request for finding in found["findings"] for request in finding["requests"]}
        imposters = run.began_with_one_token()
        say(f"{rule}: gap mean {found['gap_mean']:.4f}, max {found['gap_max']:.3f}, floor "
            f"{found['floor']:.3f}; began with one token: {sorted(imposters)}; named: {sorted(named)}")
        # On the first lap of the pool an imposter's blocks are still zeros.
        expected = {name for name in imposters if not name.startswith("s1.")}
        expected = expected if rule == "old-rule" else set()
        right = named == expected and (rule == "healthy" or bool(expected))
        say(f"{'ok' if right else 'FAILED'}: {rule}")
        holds &= right
    return 0 if holds else 1


sys.exit(main())
