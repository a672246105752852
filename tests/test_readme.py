"""The README's examples run, and print what it says they print."""

import contextlib
import io
import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def test_the_python_examples_print_what_the_readme_shows_and_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checked = 0
    for _ in range(2):
        names: dict[str, object] = {}
        for (language, code), (shown, expected) in pairwise(BLOCKS):
            if language == "python":
                assert shown == "text", "a python block is followed by its output"
                with contextlib.redirect_stdout(io.StringIO()) as printed:
                    exec(code, names)
                assert printed.getvalue() == expected
                checked += 1
    assert checked >= 4


def sessions() -> list[tuple[str, str]]:
    """Commands of ours shown with their output."""
    texts = [text for language, text in BLOCKS if language == "console"]
    command = r"\$ ((?:echo [^\n|]* \| )?writehead [^\n]*)\n(.+)"
    pairs = [re.match(command, text, re.DOTALL) for text in texts]
    return [(match[1], match[2]) for match in pairs if match]


@pytest.mark.parametrize(("command", "expected"), sessions())
def test_the_commands_print_what_the_readme_shows(command, expected):
    # the first word that is ours; an echo before it goes to its standard input
    line = re.sub(r"\bwritehead ", f"{shlex.quote(sys.executable)} -m writehead ", command, count=1)
    done = subprocess.run(line, shell=True, capture_output=True, text=True, check=True)
    printed = [line.rstrip() for line in done.stdout.splitlines()]
    elided, _, shown = expected.rpartition("…\n")
    assert not elided.strip()
    lines = [line.rstrip() for line in shown.splitlines()]
    start = printed.index(lines[0])
    assert printed[start : start + len(lines)] == lines


def test_the_make_targets_of_the_readme_exist():
    makefile = (README.parent / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^\$ make (\w+)", README.read_text(encoding="utf-8"), re.MULTILINE)
    assert targets == ["demo", "test"]
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
