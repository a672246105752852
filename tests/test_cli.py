import dataclasses
import json
import logging
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from processes import environment
from writehead.cli import app, main
from writehead.model import make_model
from writehead.paper.presets import preset, preset_names
from writehead.runs import save_run


def command(
    *arguments: str, redirect: str = "", paths: tuple[Path, ...] = (), **variables: str
) -> tuple[int, bytes, bytes]:
    """Runs the command line in a process of its own: exit code, output, errors."""
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {redirect}', "sh", sys.executable, "-m", "writehead", *arguments],
        env=environment(*paths, **variables),
        capture_output=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def explained(writehead, *arguments: object) -> dict:
    """The JSON that `explain` prints."""
    code, out, err = writehead("explain", *arguments, "--json")
    assert code == 0, err
    return json.loads(out)


def test_explain_prints_a_page_and_json(writehead):
    code, out, _ = writehead("explain", "wmt14/multi-query")
    assert code == 0
    assert "211M parameters" in out
    assert "518 µs" in out
    answer = explained(writehead, "wmt14/multi-query", "--position=0", "--batch=999", "--beam=3")
    assert answer["parameters"]["total"] == sum(answer["parameters"]["parts"].values())
    setting, step = answer["setting"], answer["decoder_step"]
    assert (step["position"], setting["batch"], setting["beam"]) == (0, 999, 3)
    for key in ("operations", "bytes", "floor_us"):
        assert step[key] == pytest.approx(sum(part[key] for part in step["parts"]))
    assert answer["comparison"]["multi-head"]["f"] == 4096
    assert answer["comparison"]["gain"] > 1
    sources = [explained(writehead, f"{name}/multi-query")["setting"] for name in ("wmt14", "lm1b")]
    assert [setting["source"] for setting in sources] == [128, 0]


def test_explain_takes_a_run_other_sizes_and_another_chip(writehead, tmp_path):
    config = dataclasses.replace(preset("tiny/multi-query"), f=8, window=3, bias=True)
    save_run(tmp_path / "run", make_model(config))
    answer = explained(writehead, tmp_path / "run")
    assert (answer["config"], answer["comparison"]) == (config.to_json(), None)
    assert writehead("explain", tmp_path / "run")[0] == 0
    grouped = preset("wmt14/multi-head").with_write_heads(2)
    assert grouped.with_write_heads(1) == preset("wmt14/multi-query")
    sizes = ("wmt14/multi-head", "--set=model.g=2", f"--set=model.f={grouped.f}")
    assert explained(writehead, *sizes)["config"] == grouped.to_json()
    figures = {"bandwidth": 1e12, "flops": 1e30, "memory": 1e6}
    options = [f"--{name}={value}" for name, value in figures.items()]
    answer = explained(writehead, "lm1b/multi-head", "--chip=l4", *options)
    assert {name: answer["chip"][name] for name in figures} == figures
    assert answer["fits"] is False
    assert explained(writehead, "lm1b/multi-head", "--chip=l4")["chip"]["name"] == "l4"


def test_presets_are_listed(writehead):
    code, out, _ = writehead("presets")
    assert code == 0
    rows = out.splitlines()[1:][: len(preset_names())]
    assert [row.split()[0] for row in rows] == preset_names()
    row = "wmt14/multi-query 6+6 1024 8 1 128 5440 210,796,544 100000"
    assert " ".join(rows[1].split()) == row


@pytest.mark.parametrize("terminal", [{"FORCE_COLOR": "1"}, {}], ids=["terminal", "pipe"])
def test_the_presets_are_not_cut_off_and_fit_in_80_columns(terminal):
    result = CliRunner().invoke(app, ["presets"], env={"COLUMNS": "40", **terminal})
    text = re.sub(r"\x1b\[\d+m", "", result.output)
    assert (text != result.output) == bool(terminal)
    row = "bundled-teacher/multi-query-local 10+4 1024 8 1 128 5248 210,274,304 20000"
    assert row in [" ".join(line.split()) for line in text.splitlines()]
    assert max(map(len, text.splitlines())) <= 80


def test_every_verb_answers_help_with_an_example():
    text = CliRunner().invoke(app, ["--help"]).output.partition("Commands")[2]
    listed = re.findall(r"^\W+([a-z]+)\s+[A-Z]", text, re.MULTILINE)
    assert listed[:3] == ["demo", "presets", "explain"]
    assert set(listed) == set(get_command(app).commands)
    for verb in listed:
        result = CliRunner().invoke(app, [verb, "--help"])
        assert result.exit_code == 0
        assert f"Example: writehead {verb}" in " ".join(result.output.split())
        assert CliRunner().invoke(app, [verb, "-h"]).output == result.output


CLOSED = b"error: standard output could not be written: Bad file descriptor\n"
FULL = b"error: standard output could not be written: No space left on device\n"
NO_INPUT = b"error: standard input is closed; pass a file\n"


@pytest.mark.parametrize(
    ("verb", "redirect", "code", "error"),
    [
        ("--version", ">&-", 2, CLOSED),
        ("presets", ">&-", 2, CLOSED),
        ("presets", "2>&-", 0, b""),
        ("translate", "<&-", 2, NO_INPUT),
        ("presets", "> /dev/full", 2, FULL),
        ("presets", "> /dev/full 2>&1", 2, b""),
        ("presets", "| head -n 1", 0, b""),
    ],
)
def test_standard_streams_may_be_closed_or_full(verb, redirect, code, error):
    if "full" in redirect and not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full")
    result, out, err = command(verb, redirect=redirect)
    assert (result, err) == (code, error)
    assert bool(out) == (code == 0)


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
@pytest.mark.parametrize("verb", ["explain wmt14/multi-query", "explain µs–日本"])
def test_a_terminal_of_any_encoding_can_be_written_to(verb, encoding):
    code, out, err = command(*verb.split(), PYTHONIOENCODING=encoding)
    assert b"Traceback" not in err
    assert (code, err.count(b"\n")) == ((2, 1) if "µ" in verb else (0, 0))
    (out + err).decode(encoding)


def test_ctrl_c_during_the_first_imports_is_silent(tmp_path):
    interrupted = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"
    (tmp_path / "typer.py").write_text(interrupted)
    assert command("presets", paths=(tmp_path,)) == (-signal.SIGINT, b"", b"")


def test_text_from_files_cannot_control_the_terminal(writehead, monkeypatch, tmp_path):
    hostile = "\x1b]0;title\x07\x9b31m\u202e\n:skull: [red]" * 2000
    save_run(tmp_path / "run", make_model(preset("tiny/multi-query")))
    config = json.loads((tmp_path / "run/config.json").read_text())
    (tmp_path / "run/config.json").write_text(json.dumps(config | {hostile: 1}))
    code, _, error = writehead("explain", tmp_path / "run")
    assert code == 2

    def warn() -> None:
        logging.getLogger("writehead.engine").warning("a line of %s", hostile)

    monkeypatch.setattr(sys.modules[main.__module__], "app", warn)
    code, _, warning = writehead()
    assert code == 0
    for begins, printed in (("error: ", error), ("warning: a line of", warning)):
        assert printed.startswith(begins)
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]", printed)
        assert printed.count("\n") == 1
        assert len(printed) < 2100


def test_memory_that_runs_out_is_one_line_and_a_bug_is_not(writehead, monkeypatch):
    raised = [RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9")]
    raised += [RuntimeError("CUDA out of memory. Tried to allocate 9 GiB"), MemoryError()]

    def fail() -> None:
        raise raised.pop()

    monkeypatch.setattr(sys.modules[main.__module__], "app", fail)
    while raised:
        code, out, err = writehead()
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert "not enough memory" in err
    raised.append(RuntimeError("a bug"))
    with pytest.raises(RuntimeError, match="a bug"):
        writehead()
