"""Watches a run through a real TensorBoard server and prints how long each step takes from its end
to its appearing over HTTP. A check to run by hand, not a timed test.

Usage: live.py GAPSCOPE EXP.toml [--seconds N] [--reload N] [--set K=V]...
Needs the package tensorboard in the interpreter that runs this.
"""

import argparse
import json
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request

TAG = "gap/logp_abs_diff_max"
POLL_S = 0.02


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def wait_for(port):
    """Until the server accepts connections."""
    while True:
        with socket.socket() as sock:
            if sock.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(POLL_S)


def steps_ended(path):
    """Whole lines of steps.jsonl: the steps that have ended."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line)["step"] for line in text.splitlines(keepends=True) if line.endswith("\n")]


def steps_served(url):
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return [point[1] for point in json.load(answer)]
    except (urllib.error.URLError, ConnectionError):
        return []  # Not up yet, or it does not know the tag yet.


def watch(path, url, deadline):
    """When each step had ended, and when the server first showed it."""
    ended, served = {}, {}
    while time.monotonic() < deadline:
        for step in steps_ended(path):
            ended.setdefault(step, time.monotonic())
        for step in steps_served(url):
            served.setdefault(step, time.monotonic())
        time.sleep(POLL_S)
    return ended, served


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("gapscope")
    parser.add_argument("experiment")
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--reload", type=float, default=1)
    parser.add_argument("--set", action="append", default=[])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as parent:
        out = pathlib.Path(parent) / "run"
        port = free_port()
        query = urllib.parse.urlencode({"run": "run/tb", "tag": TAG})
        url = f"http://127.0.0.1:{port}/data/plugin/scalars/scalars?{query}"
        board = [sys.executable, "-m", "tensorboard.main", "--logdir", parent, "--port", str(port)]
        run = [args.gapscope, "run", args.experiment, "--out", str(out)]
        run += [word for assignment in args.set for word in ("--set", assignment)]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        server = subprocess.Popen(board + ["--reload_interval", str(args.reload)], **quiet)
        try:
            wait_for(port)  # Delays are those of a server that runs already.
            loop = subprocess.Popen(run, **quiet)
            try:
                ended, served = watch(out / "steps.jsonl", url, time.monotonic() + args.seconds)
                finished = loop.poll() is not None
            finally:
                loop.terminate()
                loop.wait()
        finally:
            server.terminate()
            server.wait()
    report(ended, served, finished)


def report(ended, served, finished):
    last = time.monotonic()
    delays = [served[step] - ended[step] for step in ended if step in served]
    missing = sorted(step for step in ended if step not in served)
    print(f"{len(ended)} steps ended, {len(delays)} of them served, run finished: {finished}")
    if delays:
        middle = statistics.median(delays)
        print(f"delay from a step's end: median {middle:.2f} s, max {max(delays):.2f} s")
    if missing:
        age = last - ended[missing[0]]
        print(f"not served: steps {missing[0]} to {missing[-1]}, the oldest {age:.2f} s old")


main()
