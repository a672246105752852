"""The pages under docs/ and CONTRIBUTING.md: examples run, names exist, pages are short.

A `console run` block is executed and its output compared. Other console blocks take too long or
need files; their commands are checked for options that exist, and the shortest way through
getting-started.md is run with fewer steps.
"""

import re
import shlex
from pathlib import Path

import pytest
import typer

from doc_examples import ROOT, assert_shows, blocks, run, run_python, sessions
from writehead.cli import app

PACKAGE = ROOT / "src" / "writehead"
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "CONTRIBUTING.md"]

MAX_WORDS = 1500

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@every_page
def test_the_python_examples_print_what_the_page_shows(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_python(page)


@every_page
def test_the_commands_print_what_the_page_shows(page, tmp_path):
    for command, expected in sessions(page, "console run"):
        assert_shows(expected, run(command, tmp_path))


@pytest.mark.slow
def test_the_commands_of_getting_started_work(tmp_path):
    ours = [
        command
        for command, _ in sessions(ROOT / "docs" / "getting-started.md", "console")
        if "writehead " in command
    ]
    assert len(ours) >= 4
    for command in ours:
        command = command.replace("--embedded", "--embedded --pairs 400")
        run(re.sub(r"(--preset \S+)", r"\1 --set train.steps=2", command), tmp_path)


def invocations(page: Path) -> list[list[str]]:
    """The arguments of every `writehead` command on a page."""
    infos = {info for info, _ in blocks(page) if info.startswith("console")}
    lines = [command for info in infos for command, _ in sessions(page, info)]
    found = []
    for line in lines:
        for part in re.split(r"[|<>]", line.partition("  #")[0]):
            words = shlex.split(part)
            if "writehead" in words:
                found.append(words[words.index("writehead") + 1 :])
    return found


@every_page
def test_commands_and_their_options_exist(page):
    for words in invocations(page):
        command = typer.main.get_command(app)
        while words and words[0] in getattr(command, "commands", {}):
            command, words = command.commands[words[0]], words[1:]
        known = {
            name
            for option in command.params
            for name in (*option.opts, *option.secondary_opts)
            if name.startswith("-")
        }
        used = {word.partition("=")[0] for word in words if word.startswith("-") and word != "-"}
        assert used <= {*known, "--help", "--version"}, command.name


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@every_page
def test_links_and_paths_exist(page):
    text = page.read_text(encoding="utf-8")
    for target, anchor in re.findall(r"\]\((?!https?://)([^)#\s]*)#?([^)\s]*)\)", text):
        linked = page.parent / target if target else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), f"{target}#{anchor}"
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    for name in re.findall(r"`([\w./-]+)`", prose):
        ours = re.match(r"(src|tests|docs|results|\.ci|\.github)/", name)
        if ours or name.endswith(".py"):
            assert (ROOT / name).exists() or (PACKAGE / name).exists(), name


@every_page
def test_pages_are_short(page):
    assert len(page.read_text(encoding="utf-8").split()) <= MAX_WORDS


def test_pre_commit_has_the_ruff_of_constraints():
    [version] = re.findall(r"^ruff==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert f"rev: v{version} " in (ROOT / ".pre-commit-config.yaml").read_text()
