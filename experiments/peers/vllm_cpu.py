#!/usr/bin/env python3
"""Holds gapscope against a real vLLM server on the CPU: one command, every claim checked.

usage: vllm_cpu.py DIR [--only WORD]

DIR gets the model, every run, and output.txt with what was run and found. vLLM is taken from the
environment that $GAPSCOPE_VLLM names, or target/vllm-venv, which vllm_environment.sh makes where it
is not there; the binary is $GAPSCOPE, or target/release/gapscope. Ends with 1 if a claim fails.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
VENV = Path(os.environ.get("GAPSCOPE_VLLM", REPOSITORY / "target/vllm-venv")).expanduser()
GAPSCOPE = os.environ.get("GAPSCOPE", str(REPOSITORY / "target/release/gapscope"))
EXPERIMENT = HERE / "vllm_cpu.toml"
PORT = 8211
# Two f32 forwards of different libraries: nats.
BOUND = 5e-5
TOKENS = 64 * 4 * 24
ENVIRONMENT = os.environ | {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1"}


class Claim(Exception):
    """A claim that does not hold."""


class Check:
    """The claims, and what came of them."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.model = out / "model"
        self.log = (out / "output.txt").open("w")

    def say(self, text: str) -> None:
        print(text, flush=True)
        self.log.write(text + "\n")
        self.log.flush()

    def server(self, *flags: str, model: Path | None = None) -> str:
        """The command that starts vLLM; the wheel's own `vllm` cannot find its version."""
        words = [VENV / "bin/python", "-m", "vllm.entrypoints.openai.api_server", "--model",
                 model or self.model, "--served-model-name", "tiny", "--host", "{host}", "--port", "{port}",
                 "--dtype", "float32", "--enforce-eager", *flags]
        return shlex.join(map(str, words))

    def gapscope(self, verb: str, name: str, settings: dict[str, object], flags: tuple[str, ...] = (),
                 code: int = 0, experiment: Path = EXPERIMENT) -> Ran:
        """One command of gapscope over a server that it starts, in a folder of that name."""
        command = [GAPSCOPE, verb, str(experiment), "--out", str(self.out / name)]
        settings = {"model.path": str(self.model),
                    "engine.launch.command": self.server("--max-model-len", "512", *flags)} | settings
        for key, value in settings.items():
            command += ["--set", f"{key}={json.dumps(value)}"]
        return self.run(command, name, code)

    def run(self, command: list[str], name: str, code: int) -> Ran:
        self.say("$ " + shlex.join(command).replace(str(self.out), "DIR")
                 .replace(str(VENV), "VLLM").replace(GAPSCOPE, "gapscope"))
        done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY,
                              env=ENVIRONMENT, check=False)
        for line in (done.stdout + done.stderr).splitlines():
            self.say("  " + line.replace(str(self.out), "DIR"))
        if done.returncode != code:
            raise Claim(f"{name} ended with {done.returncode}, not {code}")
        return Ran(self.out / name, done.stdout + done.stderr)

    def claim(self, holds: bool, what: str) -> None:
        self.say(f"{'ok' if holds else 'FAILED'}: {what}")
        if not holds:
            raise Claim(what)


class Ran:
    """What a command has left and printed."""

    def __init__(self, folder: Path, text: str) -> None:
        self.folder, self.text = folder, text

    def summary(self) -> dict:
        return json.loads((self.folder / "summary.json").read_text())

    def kinds(self) -> list[str]:
        return [finding["kind"] for finding in self.summary()["findings"]]


def healthy(check: Check, ran: Ran, what: str, tokens: int = TOKENS) -> None:
    found = ran.summary()
    check.claim(
        found["n_tokens"] == tokens and found["nonfinite"] == 0 and not found["findings"]
        and found["gap_max"] <= BOUND,
        f"{what}: {found['n_tokens']} tokens, |d| at most {found['gap_max']:.2e} of {BOUND:.0e}, "
        f"floor {found['floor']:.2e}, no finding")


def raw(check: Check) -> None:
    """vLLM's default: log-probabilities before temperature and filters."""
    ran = check.gapscope("run", "raw", {"check.legs": ["prefill"]})
    healthy(check, ran, "raw, temperature 1, with vLLM's own prefill as a leg")
    settings = {"rollout.temperature": 0.6, "rollout.top_p": 0.8}
    healthy(check, check.gapscope("run", "raw-cold", settings), "raw, temperature 0.6, top-p 0.8")


def full(check: Check) -> None:
    """Prompts and completions that fill the server's context to the last token."""
    settings = {"check.legs": ["prefill"], "task.prompt_tokens": 16, "engine.max_model_len": 40}
    command = {"engine.launch.command": check.server("--max-model-len", "{engine.max_model_len}")}
    ran = check.gapscope("run", "full", settings | command)
    healthy(check, ran, "a context of 40 for 16 tokens and 24")
    row = json.loads((ran.folder / "steps.jsonl").read_text().splitlines()[0])
    compared = row["gap_detail/decode_prefill/n_tokens"]
    check.claim(compared == TOKENS, f"vLLM's own prefill has all of them: {compared:.0f}")

    settings["rollout.max_new_tokens"] = 25
    command = {"engine.launch.command": check.server("--max-model-len", "40")}
    ran = check.gapscope("run", "too-long", settings | command | {"engine.max_model_len": 41}, code=1)
    check.claim("start it with --max-model-len 41" in ran.text, "one more: refused, the fix named")


PROCESSED = ("--logprobs-mode", "processed_logprobs")
COLD = {"rollout.temperature": 0.6}


def processed(check: Check) -> None:
    """After temperature and filters: as the contract says, against it, and without one."""
    told = COLD | {"engine.logprobs_mode": "processed_logprobs"}
    ran = check.gapscope("run", "processed", told, PROCESSED)
    healthy(check, ran, "processed, temperature 0.6, under that contract")

    ran = check.gapscope("run", "refused", COLD, PROCESSED, code=1)
    fix = 'set engine.logprobs_mode = "processed_logprobs"'
    check.claim(fix in ran.text, "processed, where raw was said: refused, and the fix named")

    withheld = COLD | {"engine.check_contract": False}
    ran = check.gapscope("run", "withheld", withheld, PROCESSED)
    message = ran.summary()["findings"][0]["message"]
    found = float(re.search(r"after temperature ([0-9.]+)", message)[1])
    check.claim(ran.kinds() == ["logprob_mode"] and abs(found - 0.6) <= 0.01,
                f"the contract withheld: logprob_mode, temperature {found} found")

    withheld = {"rollout.top_p": 0.8, "engine.check_contract": False}
    ran = check.gapscope("run", "withheld-top-p", withheld, PROCESSED)
    message = ran.summary()["findings"][0]["message"]
    mass = re.search(r"kept mass ([0-9.]+)", message)
    check.claim(ran.kinds() == ["logprob_mode"] and mass is not None,
                f"top-p 0.8, withheld: logprob_mode, kept mass {mass and mass[1]}")


def dies(check: Check) -> None:
    """A seed beside a chunked prompt ends vLLM's CPU engine in the middle of a batch."""
    settings = {"engine.request_seeds": True, "steps": 3}
    flags = ("--max-num-batched-tokens", "64", "--max-num-seqs", "64")
    ran = check.gapscope("run", "dies", settings, flags, code=1)
    check.claim("has ended" in ran.text and "offset" in ran.text,
                "a server that dies in mid-batch: survived, with its last words")
    check.claim((ran.folder / "server-0.log").stat().st_size > 0 and not listens(),
                "its log is kept, and nobody listens at its address any more")


def sweep(check: Check) -> None:
    """A real flag of vLLM at two values, of which the second is more than the model has."""
    text = EXPERIMENT.read_text() + '\n[sweep]\n"engine.max_model_len" = [256, 4096]\n'
    experiment = check.out / "sweep.toml"
    experiment.write_text(text)
    settings = {"engine.launch.command": check.server("--max-model-len", "{engine.max_model_len}")}
    ran = check.gapscope("sweep", "sweep", settings, code=1, experiment=experiment)
    points = json.loads((ran.folder / "sweep.json").read_text())["points"]
    first, second = points
    check.claim(first["error"] is None and first["summary"]["gap_max"] <= BOUND,
                f"the first point: |d| at most {first['summary']['gap_max']:.2e}, no error")
    check.claim("max_model_len" in (second["error"] or ""),
                f"the second one is a row with its error: {(second['error'] or '')[-200:]}")


def killed(check: Check) -> None:
    """The server is killed half-way, and started again."""
    new = 200
    settings = {"engine.launch.restarts": 1, "engine.max_concurrent_requests": 32,
                "rollout.max_new_tokens": new, "check.floor": 1e-4}
    killer = threading.Thread(target=kill_half_way, args=(check,))
    killer.start()
    ran = check.gapscope("run", "killed", settings)
    killer.join()
    check.claim("starting it again" in ran.text, "the server was killed and started again")
    healthy(check, ran, "no rollout lost or doubled", 64 * 4 * new)
    row = json.loads((ran.folder / "steps.jsonl").read_text().splitlines()[0])
    check.claim(row["rollout/requests"] == 256, "256 rollouts of 256")


def kill_half_way(check: Check) -> None:
    log = check.out / "killed/server-0.log"
    answered = '"POST /v1/completions HTTP/1.1" 200'
    while not log.exists() or log.read_text(errors="replace").count(answered) < 100:
        time.sleep(0.05)
    # The first process of the group is the one that listens.
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"vllm.entrypoints.openai.api_server" in words and str(PORT).encode() in words:
            os.kill(int(process.name), signal.SIGKILL)
            check.say(f"killed {process.name}")


def audit(check: Check) -> None:
    """A server that runs already, asked by `audit --server`."""
    prompts = check.out / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{a}+{b}="}) + "\n"
                               for a in range(8) for b in range(4)))
    command = check.server("--max-model-len", "512").replace("{host}", "127.0.0.1")
    command = shlex.split(command.replace("{port}", str(PORT)))
    log = (check.out / "audited-server.log").open("w")
    server = subprocess.Popen(command, stdout=log, stderr=log, env=ENVIRONMENT,
                              start_new_session=True)
    try:
        while not listens():
            time.sleep(0.5)
        url = f"http://127.0.0.1:{PORT}"
        ran = check.run([GAPSCOPE, "audit", "--server", url, "--prompts", str(prompts), "--model",
                         str(check.model), "--set", "rollout.ignore_eos=true", "--out",
                         str(check.out / "audit"), "--fail-on", "finding"], "audit", 0)
        healthy(check, ran, "audit --server", 32 * 4 * 64)
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()


def learns(check: Check) -> None:
    """New weights reach the server through its model folder, which held others at its start."""
    served = check.out / "served"
    subprocess.run([VENV / "bin/python", HERE / "tiny_llama.py", served, "7"], check=True)
    # No answer of random weights is right, so that it is decay alone that moves them.
    settings = {"trainer.update": "adamw", "trainer.learning_rate": 1e-2, "steps": 3,
                "trainer.weight_decay": 1.0, "engine.sync_folder": str(served),
                "check.floor": 1e-4,
                "engine.launch.command": check.server("--max-model-len", "512", model=served)}
    ran = check.gapscope("run", "learns", settings)
    first = (check.model / "model.safetensors").read_bytes()[-4096:]
    last = (served / "model.safetensors").read_bytes()[-4096:]
    moved = sum(a != b for a, b in zip(first, last))
    check.claim(moved > 1000, f"{moved} of the last 4,096 bytes of the weights have changed")
    healthy(check, ran, "three steps with updates of the weights", 3 * TOKENS)


def listens() -> bool:
    probe = subprocess.run(
        [sys.executable, "-c",
         "import urllib.request as u; u.urlopen('http://127.0.0.1:%d/health', timeout=5)" % PORT],
        capture_output=True, check=False)
    return probe.returncode == 0


CLAIMS = [raw, full, processed, dies, sweep, killed, audit, learns]


def main() -> int:
    words = sys.argv[1:]
    if not words or words[0].startswith("-"):
        print(__doc__, file=sys.stderr)
        return 2
    out = Path(words[0]).resolve()
    only = words[2] if words[1:2] == ["--only"] else ""
    out.mkdir(parents=True, exist_ok=True)
    python = VENV / "bin/python"
    if not python.exists():
        subprocess.run([HERE / "vllm_environment.sh", VENV], check=True)
    check = Check(out)
    subprocess.run([python, HERE / "tiny_llama.py", check.model], check=True)
    version = subprocess.run([python, "-c", "import vllm, torch; print(vllm.__version__, torch.__version__)"],
                             capture_output=True, text=True, check=True).stdout.split()
    check.say(f"vllm {version[-2]}, torch {version[-1]}")
    failed = []
    for claims in CLAIMS:
        if only not in claims.__name__:
            continue
        check.say(f"\n== {claims.__name__}: {(claims.__doc__ or '').strip()}")
        try:
            claims(check)
        except Claim as claim:
            failed.append(f"{claims.__name__}: {claim}")
    check.say("\nall claims hold" if not failed else "\nFAILED\n" + "\n".join(failed))
    return 1 if failed else 0


sys.exit(main())
