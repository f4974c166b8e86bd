"""Gives a script the packages it needs: as they are if they can be imported, or else from PyPI in
an environment of its own, made once."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path


class NoEnvironment(Exception):
    """The packages are not to be had. The text says what was found and what to do."""


def enter(venv: Path, packages: tuple[str, ...], requirements: Path) -> None:
    """Returns once the packages can be imported. Where they cannot, the script starts anew, with
    its own arguments, in the environment at `venv`."""
    try:
        for package in packages:
            importlib.import_module(package)
        return
    except Exception as error:  # A package can be broken in many ways.
        say(f"{sys.executable}: {error}")
    python = venv / "bin" / "python"
    if import_error(python, packages):
        say(f"installing {', '.join(packages)} into {venv}: about 6 GB, some minutes")
        install(venv, packages, requirements)
    say(f"going on in {venv}")
    os.execv(python, [str(python), *sys.argv])


def install(venv: Path, packages: tuple[str, ...], requirements: Path) -> None:
    """Makes the environment, or repairs one that was left half-made."""
    if venv.is_dir() and any(venv.iterdir()) and not (venv / "pyvenv.cfg").is_file():
        raise NoEnvironment(f"{venv} is a folder of something else: give --venv another one")
    python = venv / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--requirement", str(requirements)]
    run([sys.executable, "-m", "venv", str(venv)])
    run(pip)
    # A package that was cut off while it was unpacked counts as installed.
    if import_error(python, packages):
        run([*pip, "--force-reinstall"])
    if trouble := import_error(python, packages):
        raise NoEnvironment(f"what pip installed into {venv} does not work, remove it: {trouble}")


def import_error(python: Path, packages: tuple[str, ...]) -> str | None:
    """The last line of what another Python says of the import; None where all is well."""
    if not python.exists():
        return f"there is no {python}"
    command = [str(python), "-c", f"import {', '.join(packages)}"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if found.returncode == 0 else (found.stderr.strip() or "it died").splitlines()[-1]


def run(command: list[str]) -> None:
    """With what it prints, progress and reasons, on standard error."""
    say("$ " + " ".join(command))
    code = subprocess.run(command, stdout=sys.stderr, check=False).returncode
    if code != 0:
        raise NoEnvironment(
            f"that command ended with exit code {code}. It needs PyPI over the network, 7 GB of "
            "disk, and Python's venv module (on Debian: apt install python3-venv). Or run the "
            "script with a Python that has the packages")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
