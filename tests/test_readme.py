"""The README's examples run, and print what it says they print."""

import re

import pytest

from doc_examples import ROOT, assert_shows, run, run_python, sessions

README = ROOT / "README.md"
OURS = [
    (command, expected)
    for command, expected in sessions(README, "console")
    if expected and re.match(r"(echo [^|]* \| )?writehead ", command)
]


def test_the_python_examples_print_what_the_readme_shows_and_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert run_python(README) >= 2


@pytest.mark.parametrize(("command", "expected"), OURS)
def test_the_commands_print_what_the_readme_shows(command, expected, tmp_path):
    assert_shows(expected, run(command, tmp_path))


def test_the_make_targets_of_the_readme_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^\$ make (\w+)", README.read_text(encoding="utf-8"), re.MULTILINE)
    assert targets == ["demo", "test"]
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
