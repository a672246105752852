"""The environment that a result was measured in: hardware, versions, commit, date and command.

Code that runs without its git history, as from an installed package or a copied tree, reads its
commit from the variable WRITEHEAD_COMMIT.
"""

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from writehead import __version__

PEERS = ("ctranslate2", "transformers")  # listed if they are installed


def environment(device: torch.device) -> dict[str, Any]:
    """The environment of this process, as JSON values."""
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if cuda else _cpu_name()
    peers = {package: version_of(package) for package in PEERS}
    return {
        "hardware": {"device": name, "cores": os.cpu_count(), "threads": torch.get_num_threads()},
        "versions": {
            "writehead": __version__,
            "torch": torch.__version__,
            "cuda": torch.version.cuda if cuda else None,
            "triton": version_of("triton"),
            "python": platform.python_version(),
            **{package: version for package, version in peers.items() if version},
        },
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["writehead", *sys.argv[1:]]),
    }


def version_of(package: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    """The name of the CPU; Python's own functions do not return it on Linux."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "cpu"


def _commit() -> str | None:
    """The commit of this code, with a + if files have changed since; None if it is unknown."""
    if given := os.environ.get("WRITEHEAD_COMMIT"):
        return f"{given} (from WRITEHEAD_COMMIT)"
    git = ["git", "-C", str(Path(__file__).parent)]
    options: dict[str, Any] = {"capture_output": True, "text": True, "check": True}
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], **options)
        changed = subprocess.run([*git, "status", "--porcelain", "--untracked-files=no"], **options)
    except (OSError, subprocess.CalledProcessError):
        return None
    return str(head.stdout).strip() + ("+" if changed.stdout.strip() else "")
