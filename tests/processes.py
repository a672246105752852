"""Runs code in separate processes, which may be killed at any file operation."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

EVENTS = ["open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree", "step"]


def environment(*folders: Path, **variables: str) -> dict[str, str]:
    """Returns environment variables that let a process import what this one can, and `folders`."""
    paths = [*map(str, folders), *filter(None, sys.path)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **variables}


def run_python(code: str, *arguments: object, **options: object) -> tuple[int, str, str]:
    """Runs code in a separate process; returns exit code, standard output and standard error."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    settings = {"env": environment(), "capture_output": True, "text": True, **options}
    done = subprocess.run(command, **settings)
    return done.returncode, done.stdout, done.stderr


def killed_at(operation: int, folder: Path, work: Callable[[], object]) -> int:
    """Runs `work` in a child killed at a numbered operation in `folder`; returns its exit code."""
    child = os.fork()
    if child == 0:
        left = operation

        def hook(event: str, arguments: object) -> None:
            nonlocal left
            if event in EVENTS and str(folder) in str(arguments):
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1

        sys.addaudithook(hook)
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
