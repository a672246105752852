"""Kills a bulk translation at random moments; compares the output with that of a complete run.

Examples:
    python tests/kill_bulk.py news.en --lines 4000 --shards 50 --kills 30 -- --beam 1
    python tests/kill_bulk.py news.en --kills 30 --workers -- --beam 1 --cluster ray --threads 1

Arguments after -- are passed to `writehead translate`. With --workers, every other kill ends a
worker instead. Prints a line of JSON; exits with 1 if the outputs differ.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from itertools import islice, takewhile
from pathlib import Path

from processes import environment
from writehead.data.sources import read_lines

WORKERS = ("multiprocessing.spawn", "ray::Actor")  # in the command lines of workers


def main() -> int:
    options = parse()
    draw = random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="kill-bulk-") as name:
        folder = Path(name)
        lines = [*islice(read_lines(options.text), options.lines)]
        (folder / "in.txt").write_text("".join(f"{line}\n" for line in lines))
        started = time.monotonic()
        assert start(folder, "whole", options).wait() == 0
        seconds = time.monotonic() - started
        found = interrupted(folder, options, draw, max(1.0, options.longest or seconds / 3))
        found |= {"lines": len(lines), "shards": options.shards, "seconds": round(seconds, 1)}
        whole = (folder / "whole" / "in.txt").read_bytes()
        found["same"] = found["same"] and whole.count(b"\n") == len(lines)
    print(json.dumps(found))
    return 0 if found["same"] else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("text", type=Path)
    for option, default in (("lines", 4000), ("shards", 50), ("kills", 30), ("seed", 0)):
        parser.add_argument(f"--{option}", type=int, default=default)
    parser.add_argument("--longest", type=float, help="seconds between two kills, at most")
    parser.add_argument("--workers", action="store_true", help="kill workers too")
    ours = [*takewhile("--".__ne__, sys.argv[1:])]
    given = parser.parse_args(ours)
    given.arguments = sys.argv[len(ours) + 2 :]
    return given


def start(folder: Path, output: str, options: argparse.Namespace) -> subprocess.Popen:
    files = ("--input", folder / "in.txt", "--output", folder / output)
    command = [sys.executable, "-m", "writehead", "translate", *options.arguments, *files]
    command += ["--shards", options.shards]
    log = (folder / "log").open("ab")
    return subprocess.Popen([*map(str, command)], env=environment(), stderr=log)


def interrupted(
    folder: Path, options: argparse.Namespace, draw: random.Random, longest: float
) -> dict[str, float]:
    """Kills and resumes a job; returns the counts, and whether every output is the same.

    If a job ends before the last kill, a new one is started.
    """
    count: dict[str, float] = {"kills": 0, "killed workers": 0, "starts": 1, "jobs": 1}
    outputs = []
    process = start(folder, "killed", options)
    while count["kills"] < options.kills:
        try:
            process.wait(draw.uniform(0.0, longest))
        except subprocess.TimeoutExpired:
            workers = find_workers(process.pid) if options.workers and count["kills"] % 2 else []
            victim = draw.choice(workers or [process.pid])
            os.kill(victim, signal.SIGKILL)
            count["kills"] += 1
            count["killed workers"] += bool(workers)
            if workers:
                continue
            process.wait()
        else:  # the job ended before the last kill
            assert process.returncode == 0, (folder / "log").read_text()
            outputs.append((folder / "killed" / "in.txt").read_bytes())
            shutil.rmtree(folder / "killed")
            count["jobs"] += 1
        count["starts"] += 1
        process = start(folder, "killed", options)
    assert process.wait() == 0, (folder / "log").read_text()
    outputs.append((folder / "killed" / "in.txt").read_bytes())
    whole = (folder / "whole" / "in.txt").read_bytes()
    return count | {"same": all(output == whole for output in outputs)}


def find_workers(ancestor: int) -> list[int]:
    """Returns the workers among the descendants of a process."""
    parents, commands = {}, {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            commands[int(path.name)] = (path / "cmdline").read_bytes().decode(errors="replace")
        except OSError:  # it has ended
            continue
        parents[int(path.name)] = int(fields[1])
    found = []
    for pid, command in commands.items():
        above = pid
        while above in parents and above != ancestor:
            above = parents[above]
        if above == ancestor != pid and any(name in command for name in WORKERS):
            found.append(pid)
    return found


if __name__ == "__main__":
    sys.exit(main())
