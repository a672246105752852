"""The environment that a result was measured in: hardware, versions, commit, date and command."""

import os
import platform
import re
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from writehead import __version__
from writehead.util.devices import CPU_INFO

PACKAGES = ("triton", "ctranslate2", "transformers")  # listed if they are installed


def environment(device: torch.device) -> dict[str, Any]:
    """The environment of this process, as JSON values."""
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if cuda else _cpu_name()
    return {
        "hardware": {"device": name, "cores": os.cpu_count(), "threads": torch.get_num_threads()},
        "versions": {
            "writehead": __version__,
            "torch": torch.__version__,
            "cuda": torch.version.cuda if cuda else None,
            "python": platform.python_version(),
            **{package: metadata.version(package) for package in PACKAGES if find_spec(package)},
        },
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["writehead", *map(_without_folder, sys.argv[1:])]),
    }


def _without_folder(argument: str) -> str:
    """Returns the name of the file if an argument is an absolute path, which differs by machine."""
    return Path(argument).name if Path(argument).is_absolute() else argument


def _cpu_name() -> str:
    """The name of the CPU; Python's own functions do not return it on Linux."""
    text = CPU_INFO.read_text(errors="replace") if CPU_INFO.is_file() else ""
    match = re.search(r"^model name\s*: (.*)", text, re.MULTILINE)
    return match[1] if match else platform.processor() or "cpu"


def _commit() -> str | None:
    """The commit of this code, with a + if files have changed since; None if it is unknown.

    The environment variable WRITEHEAD_COMMIT is for a copy of the code without its git history.
    """
    if commit := os.environ.get("WRITEHEAD_COMMIT"):
        return f"{commit} (from WRITEHEAD_COMMIT)"
    options = ["--always", "--abbrev=40", "--exclude=*", "--dirty=+"]
    command = ["git", "-C", str(Path(__file__).parent), "describe", *options]
    with suppress(FileNotFoundError):  # git is not installed
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        return process.stdout.strip() or None
    return None
