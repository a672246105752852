"""`translate` and `generate`: files, pipes, terminals, interruptions and resuming."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import unicodedata
from unittest.mock import Mock

import pytest

from processes import environment, run_python
from texts import ODD, names, sentences
from writehead.cli.resumable import ResumableFile
from writehead.config import Batching, DecodeConfig
from writehead.engine import Engine
from writehead.engine.runner import Lane

# in float64, printed digits do not depend on the batch
SHORT = ["--max-length=9", "--device=cpu", "--dtype=float64"]
LINES = sentences(9)
TEXT = "\n".join(LINES).encode()


def command(small_runs, verb: str, *arguments: object) -> list[str]:
    run = small_runs / {"translate": "translation", "generate": "language"}[verb]
    return ["writehead", verb, str(run), *map(str, arguments)]


@pytest.fixture
def writehead(writehead, small_runs):
    """Runs a command on the run of its task: exit code, standard output, standard error."""

    def run(*arguments: object, **given: object) -> tuple[int, bytes, str]:
        code, out, err = writehead(*command(small_runs, *arguments)[1:], **given)
        return code, out.encode(), err

    return run


def load(small_runs, task: str) -> Engine:
    return Engine.load(small_runs / task, device="cpu", dtype="float64")


def clean(text: str) -> str:
    """Removes control characters, and replaces separators by spaces."""
    spaced = "".join(" " if c in "\t\n\v\f\r\x85\u2028\u2029" else c for c in text)
    return "".join(c for c in spaced if unicodedata.category(c) != "Cc")


@pytest.mark.parametrize(
    ("arguments", "options", "shown"),
    [
        ([], {"beam": 4}, "{text}"),
        (["--beam=1", "--scores", "--batch-tokens=9"], {"beam": 1}, "{text}\t{score:.6f}"),
        (["--n-best=2"], {"beam": 4, "n_best": 2}, "{i} ||| {text} ||| {score:.6f}"),
        (["--temperature=2", "--seed=3"], {"temperature": 2.0, "seed": 3}, "{text}"),
        (["--temperature=2", "--min-p=0.3"], {"temperature": 2.0, "min_p": 0.3}, "{text}"),
        (["--repetition-penalty=2"], {"beam": 1, "repetition_penalty": 2.0}, "{text}"),
    ],
)
def test_lines_are_translated_in_order(writehead, small_runs, arguments, options, shown):
    lines = [*LINES, "", "the cat."]
    code, out, err = writehead("translate", *SHORT, *arguments, stdin="\n".join(lines).encode())
    assert (code, err) == (0, "")
    outputs = load(small_runs, "translation").translate(
        lines, DecodeConfig(max_length=9, **options)
    )
    expected = [
        shown.format(i=i, text=clean(one.text), score=one.score)
        for i, output in enumerate(outputs)
        for one in output.hypotheses
    ]
    assert out.decode().split("\n") == [*expected, ""]


def test_every_input_line_gives_one_output_line(writehead, caplog):
    caplog.set_level("WARNING", "writehead.data.lines")  # a server, in another test, is quieter
    lines = [line.replace("\n", " ") for line in ODD] + LINES + ["the cat small_runs. " * 40]
    options = ("--temperature=3", "--device=cpu")  # draws control characters too
    code, out, _ = writehead("translate", *options, stdin="\r\n".join(lines).encode() + b"\r\n")
    assert code == 0
    assert f"line {len(lines)} is longer than the model's limit of 23" in caplog.text
    answers = out.decode().split("\n")
    assert len(answers) == len(lines) + 1
    assert answers == [clean(answer) for answer in answers]
    assert [not answer for answer in answers[:4]] == [True] * 4


@pytest.mark.parametrize("verb", ["translate", "generate"])
@pytest.mark.parametrize("errors", ["strict", "replace", "skip"])
def test_errors_selects_how_invalid_utf8_is_treated(writehead, verb, errors):
    arguments = (verb, *SHORT, f"--errors={errors}")
    code, out, err = writehead(*arguments, stdin=b"a dog.\nthe \xff cat\n\xe9\n")
    if errors == "strict":
        assert (code, out, "--errors" in err) == (2, b"", True)
        assert "line 2 of standard input is not UTF-8 (at byte 5)" in err
        return
    other = "a dog.\nthe \ufffd cat\n\ufffd\n" if errors == "replace" else "a dog.\n\n\n"
    assert (code, out) == writehead(verb, *SHORT, stdin=other.encode())[:2]
    assert "2 lines of standard input" in err


def test_a_prefix_file_forces_the_beginning_of_translations(writehead, tmp_path):
    prefixes = tmp_path / "prefixes"
    prefixes.write_bytes(b"the dog\n\xff\n")
    arguments = ("translate", *SHORT, "--prefix-file", prefixes)
    assert "line 2 of" in writehead(*arguments, stdin=b"a cat.\na dog.\n")[2]
    _, out, _ = writehead(*arguments, "--errors=skip", stdin=b"a cat.\na dog.\n")
    _, free, _ = writehead("translate", *SHORT, stdin=b"a cat.\na dog.\n")
    assert out.startswith(b"the dog")
    assert out.splitlines()[1] == free.splitlines()[1]
    for text, words in ((b"a\nb\nc\n", "line 3 has no prefix"), (b"a\n", "more prefixes than")):
        assert words in writehead(*arguments, "--errors=skip", stdin=text)[2]


def test_an_input_is_never_overwritten(writehead, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "P").write_text("the cat\n")
    os.symlink("P", "symlink")
    os.link("P", "hardlink")
    for verb, read, written in (
        ("translate", ["--input=P"], "symlink"),
        ("translate", ["--prefix-file=symlink"], "hardlink"),
        ("translate", [], "P"),  # standard input
        ("generate", ["--input=hardlink"], "P"),
    ):
        with open("P") as stdin:
            code, out, err = writehead(verb, *read, "-o", written, "--force", *SHORT, stdin=stdin)
        assert (code, out, f"{written} is also being read" in err) == (2, b"", True)
    assert (tmp_path / "P").read_text() == "the cat\n"
    assert names(tmp_path) == ["P", "hardlink", "symlink"]


def test_an_output_file_is_complete_and_replaced_with_force_only(writehead, tmp_path, monkeypatch):
    source, target = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_bytes(TEXT)
    files = ("translate", *SHORT, "--input", source, "--output", target)
    assert writehead(*files) == (0, b"", "")
    with monkeypatch.context() as patch:
        patch.setenv("FORCE_COLOR", "1")  # as at a terminal
        assert f"{len(LINES)} lines" in writehead(*files, "--force")[2]
    expected = writehead("translate", *SHORT, "--input", source)[1]
    assert target.read_bytes() == expected
    target.write_text("mine")
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "load", None)  # the error comes before the model is loaded
        code, _, err = writehead(*files)
    assert (code, "--force" in err) == (2, True)
    source.write_bytes(b"the cat.\n\xff\n")
    assert writehead(*files, "--force")[0] == 2
    assert target.read_text() == "mine"
    source.write_bytes(TEXT)
    assert writehead(*files, "--force") == (0, b"", "")
    assert target.read_bytes() == expected
    assert names(tmp_path) == ["in.txt", "out.txt"]


class Typed(io.TextIOWrapper):
    """Standard input at a terminal; a user types each line after the answer to the last one."""

    def __init__(self, lines: list[bytes], answered) -> None:
        super().__init__(io.BytesIO())
        self.lines, self.answered, self.seen = lines, answered, []

    def isatty(self) -> bool:
        return True

    @property
    def buffer(self):
        for line in self.lines:
            yield line
            self.seen.append(self.answered())


@pytest.mark.parametrize(
    ("verb", "options", "lines"),
    [
        ("translate", ["--n-best=3"], 3),
        ("generate", [], 1),
        ("generate", ["--samples=2", "--temperature=0.8"], 2),
    ],
)
def test_typed_lines_are_answered_at_once(verb, options, lines, writehead, capsys, monkeypatch):
    asked = [b"the cat\n", b"\n", b"a dog\n"]
    together = writehead(verb, *options, *SHORT, stdin=b"".join(asked))[1]
    monkeypatch.setenv("FORCE_COLOR", "1")  # a counter would show on standard error
    typed = Typed(asked, capsys.readouterr)
    assert writehead(verb, *options, *SHORT, stdin=typed)[0] == 0
    empty = 1 if verb == "translate" else lines  # an empty line has one translation
    assert [answer.out.count("\n") for answer in typed.seen] == [lines, empty, lines]
    assert "".join(answer.out for answer in typed.seen).encode() == together
    assert not any(" lines" in answer.err for answer in typed.seen)


@pytest.mark.parametrize(
    ("arguments", "options", "samples"),
    [
        (["--temperature=3", "--seed=5"], {"temperature": 3.0, "seed": 5}, 1),
        (["--beam=3", "--alpha=-5"], {"beam": 3, "alpha": -5.0}, 1),
        (["--temperature=9", "--min-p=1"], {}, 1),
        (["--repetition-penalty=0.001"], {"repetition_penalty": 0.001}, 1),
        (["--temperature=3", "--seed=5", "--samples=3"], {"temperature": 3.0, "seed": 5}, 3),
    ],
)
def test_prompts_are_continued(writehead, small_runs, arguments, options, samples, tmp_path):
    config, prompt = DecodeConfig(max_length=12, **options), "\x1b[31mthe\tcat"
    [answer] = load(small_runs, "language").generate([prompt], config, samples=samples)
    texts = [one.text for one in answer.hypotheses]
    assert len(texts) == samples
    assert any(text != clean(text) for text in texts) == ("seed" in options)  # control characters
    arguments = ("--max-length=12", *SHORT[1:], *arguments)
    expected = "".join(f"[31mthe cat{clean(text)}\n" for text in texts).encode()
    assert writehead("generate", f"{prompt} ", *arguments) == (0, expected, "")
    assert writehead("generate", *arguments, stdin=prompt.encode()) == (0, expected, "")
    assert writehead("generate", prompt, "-o", tmp_path / "out", *arguments) == (0, b"", "")
    assert (tmp_path / "out").read_bytes() == expected
    continued = writehead("generate", prompt, "--no-echo", *arguments)[1]
    assert continued == expected.replace(b"[31mthe cat", b"")


def start(small_runs, *arguments: object) -> subprocess.Popen:
    name, *rest = command(small_runs, *arguments)
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen([sys.executable, "-m", name, *rest], env=environment(), **pipes)


def test_a_long_line_is_warned_about_and_a_closed_pipe_is_not_an_error(small_runs, tmp_path):
    # more output than a pipe buffers
    (tmp_path / "lines").write_text("the cat small_runs. " * 20 + "\n" * 100_000, encoding="utf-8")
    with start(small_runs, "translate", "--input", tmp_path / "lines", *SHORT) as process:
        assert len(process.stdout.readline()) > 1
        process.stdout.close()
        messages = process.stderr.read().decode()
    assert process.returncode == 0
    assert messages.startswith("warning: line 1 is longer than the model's limit of 23")
    assert messages.count("\n") == 1


@pytest.mark.parametrize(
    ("verb", "number"), [("translate", signal.SIGTERM), ("generate", signal.SIGINT)]
)
def test_a_program_can_wait_for_each_answer(small_runs, writehead, verb, number):
    asked = [b"the cat\n", b"a dog\n"]
    expected = writehead(verb, *SHORT, stdin=b"".join(asked))[1].splitlines(keepends=True)
    with start(small_runs, verb, *SHORT) as process:
        for line, answer in zip(asked, expected, strict=True):
            process.stdin.write(line)
            process.stdin.flush()
            assert process.stdout.readline() == answer
        process.send_signal(number)  # while it waits for the next line
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (128 + number, b"")
    assert re.fullmatch(rb"interrupted: [12] lines? written\n", err)  # it may come before the count


KILLED = """
import json, os, signal, sys
from writehead.cli import main
from writehead.config import Batching
from writehead.cli.resumable import ResumableFile

def commit_and_die(self, commit=ResumableFile.commit):
    commit(self)
    if self.done == 4:
        os.kill(os.getpid(), signal.SIGKILL)

ResumableFile.commit = commit_and_die
Batching.lines = 2  # decoded together
for sys.argv in json.loads(sys.argv[1]):
    if os.fork() == 0:
        main()
    assert os.waitstatus_to_exitcode(os.wait()[1]) == -signal.SIGKILL
"""


def test_a_killed_command_resumes(small_runs, writehead, tmp_path):
    source, prefixes = tmp_path / "in", tmp_path / "prefixes"
    source.write_bytes(TEXT)
    prefixes.write_text("the\n" * len(LINES))
    cases = {
        "greedy": ("translate", "--beam=1", "--prefix-file", prefixes),
        "n-best": ("translate", "--n-best=2"),
        "sampled": ("translate", "--temperature=2", "--seed=3", "--scores"),
        "prompts": ("generate", "--temperature=2", "--samples=2"),
    }
    commands = [
        command(small_runs, *case, *SHORT, "--input", source, "--output", tmp_path / name)
        for name, case in cases.items()
    ]
    assert run_python(KILLED, json.dumps(commands), env=environment(OMP_NUM_THREADS="1"))[0] == 0
    assert len(names(tmp_path)) == 2 + len(cases)
    for name, case in cases.items():
        output = tmp_path / name
        assert not output.exists()
        [work] = tmp_path.glob(f".{name}.*")
        for torn in ("output", "journal"):  # as if killed in the middle of the next line
            with (work / torn).open("ab") as file:
                file.write(b"torn")
        # from standard input this time
        code, out, err = writehead(*case, *SHORT, "--output", output, stdin=TEXT)
        assert (code, out, err) == (0, b"", "resuming after line 4 of standard input\n")
        assert output.read_bytes() == writehead(*case, *SHORT, stdin=TEXT)[1]
    assert names(tmp_path) == sorted(["in", "prefixes", *cases])


def interrupt(monkeypatch, *, after: int, number: int = signal.SIGINT) -> None:
    """Interrupts the next command when this number of lines is on disk."""
    commit = ResumableFile.commit

    def interrupted(self) -> None:
        commit(self)
        if self.done == after:
            monkeypatch.setattr(ResumableFile, "commit", commit)
            os.kill(os.getpid(), number)

    monkeypatch.setattr(ResumableFile, "commit", interrupted)


@pytest.mark.parametrize(
    ("lines", "arguments", "message", "kept"),
    [
        (LINES, [], "resuming after line 4 of", 4),
        (LINES[:3], [], "resuming after line 3 of", 3),
        ([*LINES[:2], "a dog."], [], "resuming after line 2 of", 2),
        (["a dog.", *LINES[1:]], [], "starting over", 0),
        (LINES, ["--beam=2"], "starting over", 0),
    ],
)
def test_finished_lines_are_kept_while_input_and_options_are_the_same(
    writehead, monkeypatch, tmp_path, lines, arguments, message, kept
):
    monkeypatch.setattr(Batching, "lines", 2)
    output = tmp_path / "out"
    interrupt(monkeypatch, after=4)
    code, out, err = writehead("translate", *SHORT, "--output", output, stdin=TEXT)
    assert (code, out) == (130, b"")
    assert "4 lines done and kept; run the same command again to resume" in err
    [work] = tmp_path.iterdir()
    text = (work / "output").read_bytes()
    (work / "output").write_bytes(text.translate(bytes(b if b == 10 else 35 for b in range(256))))

    stdin = "\n".join(lines).encode()
    code, _, err = writehead("translate", *SHORT, *arguments, "--output", output, stdin=stdin)
    assert (code, err.count("\n")) == (0, 1)
    assert message in err
    expected = writehead("translate", *SHORT, *arguments, stdin=stdin)[1].split(b"\n")
    found = output.read_bytes().split(b"\n")
    assert found[kept:] == expected[kept:]
    assert all(set(line) == {35} for line in found[:kept])
    assert names(tmp_path) == ["out"]


def test_an_interruption_while_resuming_keeps_finished_lines(writehead, monkeypatch, tmp_path):
    monkeypatch.setattr(Batching, "lines", 2)
    arguments = ("translate", *SHORT, "--output", tmp_path / "out")
    interrupt(monkeypatch, after=4, number=signal.SIGTERM)
    assert writehead(*arguments, stdin=TEXT)[0] == 128 + signal.SIGTERM
    for bad in (b"\xff", LINES[0].encode() + b"\n" + LINES[1].encode() + b"\n\xff"):
        code, _, err = writehead(*arguments, stdin=bad)  # fails before line 4
        assert code == 2
        assert "4 lines done and kept" in err
    assert writehead(*arguments, stdin=TEXT)[2] == "resuming after line 4 of standard input\n"
    monkeypatch.setattr(Lane, "admit", Mock(side_effect=KeyboardInterrupt))
    arguments = ("translate", *SHORT, "--output", tmp_path / "another")
    assert writehead(*arguments, stdin=TEXT) == (130, b"", "interrupted: 0 lines written\n")
    assert names(tmp_path) == ["out"]


def test_the_first_of_two_commands_wins(writehead, monkeypatch, tmp_path):
    output, commit = tmp_path / "out", ResumableFile.commit

    def another_command_meanwhile(self) -> None:
        monkeypatch.setattr(ResumableFile, "commit", commit)
        commit(self)
        first = ("--beam=1", *SHORT, "--output", output)
        assert writehead("translate", *first, stdin=TEXT) == (0, b"", "")

    monkeypatch.setattr(ResumableFile, "commit", another_command_meanwhile)
    second = ("translate", *SHORT, "--output", output)
    code, _, err = writehead(*second, stdin=TEXT)
    assert (code, err.count("\n"), "--force" in err) == (2, 1, True)
    assert output.read_bytes() == writehead("translate", "--beam=1", *SHORT, stdin=TEXT)[1]
    expected = writehead("translate", *SHORT, stdin=TEXT)[1]
    monkeypatch.setattr(Lane, "admit", None)  # nothing is left to decode
    assert writehead(*second, "--force", stdin=TEXT)[0] == 0
    assert output.read_bytes() == expected
    assert names(tmp_path) == ["out"]


def test_a_command_killed_after_publishing_its_output(writehead, monkeypatch, tmp_path):
    output = tmp_path / "out"
    arguments = ("translate", *SHORT, "--output", output, "--force")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)  # as if killed before
        assert writehead(*arguments, stdin=TEXT) == (0, b"", "")
    before = output.read_bytes()
    interrupt(monkeypatch, after=1)
    assert writehead(*arguments, stdin=b"another line\n")[0] == 130
    assert output.read_bytes() == before
    assert writehead(*arguments, stdin=b"another line\n")[0] == 0
    assert names(tmp_path) == ["out"]
