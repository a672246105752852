"""README, docs/ and CONTRIBUTING.md: examples print what is shown, names exist, pages are short.

A `console run` block of a page is executed and its output compared, as are the README's commands.
Other console blocks take too long or need files; their commands are checked for options that exist,
and the shortest way through getting-started.md is run with fewer steps.
"""

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import typer

from writehead.cli import app

ROOT = Path(__file__).parent.parent
PACKAGE, README = ROOT / "src" / "writehead", ROOT / "README.md"
NOTEBOOK = ROOT / "docs" / "from-listing-to-cache.ipynb"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md")), ROOT / "CONTRIBUTING.md"]
SESSION = r"^\$ (.*?[^\\])\n(?=(.*?)(?:^\$ |\Z))"  # a command, then its output
MAX_WORDS = 1500

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def blocks(page: Path) -> list[tuple[str, str]]:
    """The fenced blocks of a page: info string and text."""
    fence = r"^```(\w[^\n]*)\n(.*?)^```$"
    return re.findall(fence, page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def sessions(page: Path, *infos: str) -> list[tuple[str, str]]:
    """The commands in blocks with these info strings, each with the output that is shown."""
    return [
        (match[1].replace("\\\n", " "), match[2])
        for info, text in blocks(page)
        if info in infos
        for match in re.finditer(SESSION, text, re.DOTALL | re.MULTILINE)
    ]


def execute(code: str, name: str, names: dict[str, object]) -> str:
    """Runs code in a namespace; returns what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, name, "exec"), names)
    return printed.getvalue()


def run(command: str, folder: Path) -> str:
    """Runs a command that names `writehead` in a shell; returns its standard output."""
    program = f"{shlex.quote(sys.executable)} -m writehead "
    line = re.sub(r"(?<![\w/.-])writehead ", lambda _: program, command)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        line, shell=True, cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command}\n{done.stderr}"
    return done.stdout


def assert_shows(expected: str, printed: str) -> None:
    """Asserts that a page shows this output; a line `…` stands for any lines left out."""
    lines = [line.rstrip() for line in printed.splitlines()]
    for part in re.split(r"^…\n", expected, flags=re.MULTILINE):
        shown = [line.rstrip() for line in part.splitlines()]
        starts = range(len(lines) - len(shown) + 1)
        start = next((i for i in starts if lines[i : i + len(shown)] == shown), None)
        assert start is not None, f"{part}\nis not in\n{printed}"
        lines = lines[start + len(shown) :]


@every_page
def test_the_python_examples_print_what_the_page_shows(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2 if page == README else 1):  # the README's can be repeated
        names: dict[str, object] = {}
        for (info, code), (following, expected) in pairwise([*blocks(page), ("", "")]):
            if info == "python":
                shown = expected if following == "text" else ""
                assert execute(code, str(page), names) == shown


@every_page
def test_the_commands_print_what_the_page_shows(page, tmp_path):
    ours = r"(echo [^|]* \| )?writehead "
    for command, expected in sessions(page, "console" if page == README else "console run"):
        if page != README or (expected and re.match(ours, command)):
            assert_shows(expected, run(command, tmp_path))


def test_the_notebook_prints_its_stored_outputs():
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    names: dict[str, object] = {}
    dtype = torch.get_default_dtype()  # the notebook sets another
    try:
        for cell in cells:
            stored = "".join(text for output in cell["outputs"] for text in output["text"])
            assert execute("".join(cell["source"]), cell["id"], names) == stored
    finally:
        torch.set_default_dtype(dtype)


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
    found = []
    for line, _ in sessions(page, "console", "console run"):
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


def test_the_make_targets_and_the_ruff_of_other_files_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^\$ make (\w+)", README.read_text(encoding="utf-8"), re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
    [version] = re.findall(r"^ruff==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert f"rev: v{version} " in (ROOT / ".pre-commit-config.yaml").read_text()
