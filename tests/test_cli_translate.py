import gzip
import io
import os
import signal
import subprocess
import sys

import pytest

from texts import ODD, engine, sentences, tokenizer
from writehead.cli import main
from writehead.config import DecodeConfig
from writehead.decoding import Batching, Engine, textio
from writehead.decoding.worker import Worker
from writehead.model import save_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with the runs `translation` and `language`."""
    folder = tmp_path_factory.mktemp("runs")
    tokenizer().save(folder / "tokenizer")
    for task in ("translation", "language"):
        save_run(folder / task, engine(task).model, tokenizer=folder / "tokenizer")
    return folder


@pytest.fixture
def writehead(runs, monkeypatch, capfdbinary):
    """Runs a verb on the run that it is for: exit code, standard output, standard error."""

    def run(verb: str, *arguments: str, stdin: object = b"") -> tuple[int, bytes, str]:
        task = {"translate": "translation", "generate": "language"}[verb]
        monkeypatch.setattr(sys, "argv", ["writehead", verb, str(runs / task), *arguments])
        given = io.TextIOWrapper(io.BytesIO(stdin)) if isinstance(stdin, bytes) else stdin
        monkeypatch.setattr(sys, "stdin", given)
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capfdbinary.readouterr()
        return code, captured.out, captured.err.decode()

    return run


def expected(runs, lines, options=None):
    return list(Engine.load(runs / "translation", device="cpu").translate(lines, options))


SHORT = ["--max-length", "9", "--device", "cpu"]


def test_lines_go_from_standard_input_to_standard_output_in_order(writehead, runs):
    lines = sentences(9)
    code, out, err = writehead("translate", *SHORT, stdin="\n".join(lines).encode())
    assert (code, err) == (0, "")
    answers = expected(runs, lines, DecodeConfig(max_length=9, beam=4))
    assert out.decode().split("\n") == [*(answer.text for answer in answers), ""]


def test_every_line_gives_one_line_whatever_it_holds(writehead, caplog):
    lines = [line.replace("\n", " ") for line in ODD] + sentences(5) + ["the cat runs. " * 40]
    written = "\r\n".join(lines).encode() + b"\r\n"
    options = ("--temperature", "3.0", "--device", "cpu")  # draws line feeds too
    code, out, _ = writehead("translate", *options, stdin=written)
    assert code == 0
    assert out.count(b"\n") == len(lines)
    assert b"\r" not in out
    answers = out.decode().split("\n")
    assert [not answer for answer in answers[:4]] == [True] * 4
    assert f"line {len(lines)} is longer than the 23 tokens" in caplog.text


def test_both_line_ends_read_alike_and_the_last_may_be_missing(writehead):
    answers = {
        writehead("translate", *SHORT, stdin=text)[1]
        for text in (b"the cat.\n\na dog.\n", b"the cat.\r\n\r\na dog.\r\n", b"the cat.\n\na dog.")
    }
    assert len(answers) == 1
    assert writehead("translate", *SHORT, stdin=b"") == (0, b"", "")


def test_the_n_best_are_numbered_and_scored(writehead, runs):
    lines = ["the cat.", "", "a small dog runs."]
    code, out, _ = writehead("translate", *SHORT, "--n-best", "2", stdin="\n".join(lines).encode())
    options = DecodeConfig(max_length=9, beam=4, n_best=2)
    assert code == 0
    assert out.decode().splitlines() == [
        f"{i} ||| {one.text} ||| {one.score:.6f}"
        for i, answer in enumerate(expected(runs, lines, options))
        for one in answer.hypotheses
    ]


def test_scores_follow_a_tab(writehead, runs):
    _, out, _ = writehead("translate", *SHORT, "--scores", "--beam", "1", stdin=b"the cat.\n\n")
    [answer, _] = expected(runs, ["the cat.", ""], DecodeConfig(max_length=9))
    score = answer.hypotheses[0].score
    assert out.decode() == f"{answer.text}\t{score:.6f}\n\t0.000000\n"


def test_what_is_read_is_never_written_over(writehead, tmp_path):
    path = tmp_path / "text"
    path.write_text("the cat\n")
    (tmp_path / "link").symlink_to(path)
    for output in (path, tmp_path / "link"):
        code, _, err = writehead("translate", "-i", str(path), "-o", str(output), "--force", *SHORT)
        assert code == 2
        assert "is what is read; write to another place" in err
    assert path.read_text() == "the cat\n"


def test_a_verb_that_is_told_to_end_leaves_nothing_half_written(writehead, tmp_path, monkeypatch):
    def told(*_: object, **__: object):
        os.kill(os.getpid(), signal.SIGTERM)
        yield from ()

    monkeypatch.setattr(Engine, "translate", told)
    before = signal.getsignal(signal.SIGTERM)
    code, _, _ = writehead("translate", "-o", str(tmp_path / "out"), *SHORT, stdin=b"the cat\n")
    assert code == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_file_is_written_whole_and_not_overwritten_unasked(writehead, tmp_path):
    source, target = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_text("the cat.\na dog.\n", encoding="utf-8")
    files = ("--input", str(source), "--output", str(target))
    code, out, _ = writehead("translate", *SHORT, *files)
    assert (code, out) == (0, b"")
    assert target.read_bytes() == writehead("translate", *SHORT, "--input", str(source))[1]

    target.write_text("mine", encoding="utf-8")
    code, _, err = writehead("translate", *SHORT, *files)
    assert code == 2
    assert "exists; choose another place, or pass --force" in err
    assert target.read_text(encoding="utf-8") == "mine"
    assert writehead("translate", *SHORT, *files, "--force")[0] == 0
    assert target.read_text(encoding="utf-8") != "mine"

    source.write_bytes(b"the cat.\n\xff\n")
    before = target.read_bytes()
    assert writehead("translate", *SHORT, *files, "--force")[0] == 2
    assert target.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.txt", "out.txt"]


def test_a_device_is_written_to_and_not_replaced(writehead):
    assert writehead("translate", *SHORT, "--output", "/dev/null", stdin=b"the cat.")[0] == 0
    assert not os.path.isfile("/dev/null")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_standard_output_without_room_is_one_sentence(runs):
    command = [sys.executable, "-m", "writehead", "translate", str(runs / "translation"), *SHORT]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            command, input=b"the cat.\n", stdout=full, stderr=subprocess.PIPE, check=False
        )
    words = b"error: standard output could not be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (2, words)


def test_a_prefix_file_says_how_translations_begin(writehead, tmp_path):
    (tmp_path / "prefixes").write_text("the dog\n\n", encoding="utf-8")
    prefixes = ("--prefix-file", str(tmp_path / "prefixes"))
    _, out, _ = writehead("translate", *SHORT, *prefixes, stdin=b"a cat.\na dog.\n")
    _, free, _ = writehead("translate", *SHORT, stdin=b"a cat.\na dog.\n")
    assert out.startswith(b"the dog")
    assert out.splitlines()[1] == free.splitlines()[1]


@pytest.mark.parametrize(
    ("arguments", "stdin", "words"),
    [
        (["translate"], b"good\nb\xe9d\n", "line 2 of standard input is not UTF-8 (its byte 2)"),
        (
            ["translate"],
            gzip.compress(b"good\n", mtime=0),
            "standard input is compressed; unpack it first",
        ),
        (["translate", "--input", "nowhere"], b"", "nowhere cannot be read: No such file"),
        (["translate", "--input", "."], b"", ". is a folder; give a file of text"),
        (["translate", "--output", "no/where"], b"a", "no/where cannot be written: No such file"),
        (["translate", "--beam", "0"], b"", "beam=0 must be at least 1"),
        (["translate", "--n-best", "9"], b"", "n_best=9 hypotheses need a beam as wide"),
        (["translate", "--top-k", "3"], b"", "set temperature too"),
        (["translate", "--beam", "99999"], b"", "beam=99999 is past the"),
        (["translate", "--max-length", "99"], b"", "max_length=99 is past the model's 40"),
        (["translate", "--batch-tokens", "0"], b"", "0 tokens a batch are too few"),
        (["translate", "--seed", "3"], b"", "--seed is for sampling"),
        (["translate", "--device", "gpu"], b"", "there is no device 'gpu'"),
        (["translate", "--dtype", "half"], b"", "there is no dtype 'half'"),
        (["generate", "--samples", "2", "a"], b"", "set a temperature"),
        (["generate", "the " * 40], b"", "prompt 1 has 40 tokens"),
        (["generate", "\udcff"], b"", "the prompt is not UTF-8"),
        (["generate", "--input", "nowhere"], b"", "nowhere cannot be read"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(
    writehead, monkeypatch, tmp_path, arguments, stdin, words
):
    monkeypatch.chdir(tmp_path)
    code, out, err = writehead(*arguments, stdin=stdin)
    assert (code, out) == (2, b"")
    assert err.startswith("error: ")
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("verb", "run", "words"),
    [
        ("translate", "language", "a language model does not translate"),
        ("generate", "translation", "a translation model continues no prompts"),
        ("translate", "nothing", "there is no run at"),
        ("translate", "mute", "has no tokenizer.model"),
    ],
)
def test_a_run_that_cannot_do_the_work_is_an_error(runs, monkeypatch, capsys, verb, run, words):
    if run == "mute" and not (runs / "mute").exists():
        save_run(runs / "mute", engine("translation").model)
    monkeypatch.setattr(sys, "argv", ["writehead", verb, str(runs / run), "--device", "cpu"])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"the cat\n")))
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert words in capsys.readouterr().err


class Typed:
    """Standard input at a terminal: a line is typed only once the last one was answered."""

    def __init__(self, lines: list[bytes], answered) -> None:
        self.lines, self.answered = lines, answered
        self.seen: list[bytes] = []
        self.buffer = self

    def isatty(self) -> bool:
        return True

    def __enter__(self) -> "Typed":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __iter__(self):
        for line in self.lines:
            yield line
            self.seen.append(self.answered())


@pytest.mark.parametrize(
    ("verb", "options", "lines"),
    [
        ("translate", [], 1),
        ("translate", ["--n-best=3"], 3),
        ("generate", [], 1),
        ("generate", ["--beam=2"], 1),
        ("generate", ["--samples=2", "--temperature=0.8"], 2),
    ],
)
def test_at_a_terminal_every_line_is_answered_at_once(
    verb, options, lines, writehead, capfdbinary, monkeypatch
):
    asked = [b"the cat\n", b"\n", b"a dog\n"]
    options = [*options, *SHORT, "--dtype=float64"]  # in which no printed digit is the batch's
    together = writehead(verb, *options, stdin=b"".join(asked))[1]
    monkeypatch.setenv("FORCE_COLOR", "1")  # a counter would show on standard error
    typed = Typed(asked, capfdbinary.readouterr)
    assert writehead(verb, *options, stdin=typed)[0] == 0
    empty = 1 if verb == "translate" else lines  # nothing has one translation
    assert [answer.out.count(b"\n") for answer in typed.seen] == [lines, empty, lines]
    assert b"".join(answer.out for answer in typed.seen) == together
    assert not any(b"a second" in answer.err for answer in typed.seen)


def test_at_a_terminal_a_line_that_is_not_utf8_is_said_and_the_next_is_answered(
    writehead, capfdbinary
):
    typed = Typed([b"the \xff cat\n", b"a dog\n"], lambda: capfdbinary.readouterr())
    assert writehead("translate", *SHORT, stdin=typed)[0] == 0
    bad, good = typed.seen
    assert bad.out == b""
    assert bad.err.endswith(b"line 1 of standard input is not UTF-8 (its byte 5); type it again\n")
    assert (good.out, good.err) == (writehead("translate", *SHORT, stdin=b"a dog")[1], b"")


def test_with_standard_error_closed_a_line_that_is_not_utf8_leaves_the_output_alone(
    writehead, capfdbinary, monkeypatch
):
    typed = Typed([b"the \xff cat\n", b"a dog\n"], lambda: None)
    said = writehead("translate", *SHORT, stdin=b"a dog")[1]
    monkeypatch.setattr(sys, "stderr", None)
    assert writehead("translate", *SHORT, stdin=typed)[:2] == (0, said)


def test_one_prompt_is_continued_as_the_engine_does(writehead, runs):
    loaded = Engine.load(runs / "language", device="cpu")
    options = DecodeConfig(max_length=12, temperature=0.9, seed=4)
    [answer] = loaded.generate(["the cat"], options)
    arguments = ("--max-length", "12", "--temperature", "0.9", "--seed", "4", "--device", "cpu")
    assert writehead("generate", "the cat ", *arguments) == (
        0,
        f"the cat{answer.text}\n".encode(),
        "",
    )
    _, out, _ = writehead("generate", "the cat", *arguments, "--no-echo")
    assert out.decode() == answer.text + "\n"


def test_many_prompts_give_a_line_for_each_sample(writehead, runs, tmp_path):
    prompts = ["the cat", "", "a small dog"]
    (tmp_path / "prompts").write_text("\n".join(prompts), encoding="utf-8")
    arguments = ("--temperature", "2.0", "--samples", "3", *SHORT)
    code, out, _ = writehead("generate", "--input", str(tmp_path / "prompts"), *arguments)
    lines = out.decode().split("\n")
    assert code == 0
    assert len(lines) == 10
    for i, prompt in enumerate(prompts):
        assert all(line.startswith(prompt) for line in lines[3 * i : 3 * i + 3])
    piped = writehead("generate", *arguments, stdin="\n".join(prompts).encode())
    assert piped[1] == out


def test_the_length_penalty_of_a_prompts_beam_is_the_users(writehead, runs):
    loaded = Engine.load(runs / "language", device="cpu")
    outputs = []
    for alpha in (-5.0, 5.0):
        options = DecodeConfig(max_length=12, beam=3, alpha=alpha)
        [answer] = loaded.generate(["the cat"], options)
        arguments = ("--max-length=12", "--beam=3", f"--alpha={alpha}", "--device=cpu")
        outputs.append(writehead("generate", "the cat", *arguments)[1].decode())
        assert outputs[-1] == f"the cat{answer.text}\n"
    assert len(outputs[0]) < len(outputs[1])


def test_progress_is_shown_at_a_terminal_only(writehead, monkeypatch, tmp_path):
    output = ("--output", str(tmp_path / "out"), "--force")
    assert writehead("translate", *SHORT, *output, stdin=b"the cat.\n")[2] == ""
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "1 lines" in writehead("translate", *SHORT, *output, stdin=b"the cat.\n")[2]


def test_the_counter_shows_how_many_lines_a_file_has(writehead, monkeypatch, tmp_path):
    monkeypatch.setenv("FORCE_COLOR", "1")
    for text, total in (("the cat.\n\na dog.\n", 3), ("the cat.\na dog.", 2)):
        (tmp_path / "in").write_text(text)
        files = ("--input", str(tmp_path / "in"), "--output", str(tmp_path / "out"), "--force")
        assert f"{total} of {total} lines" in writehead("translate", *SHORT, *files)[2]


@pytest.mark.parametrize(("verb", "extra"), [("translate", ["--beam=1"]), ("generate", [])])
def test_an_interruption_says_how_many_decoded_lines_are_written(
    writehead, monkeypatch, tmp_path, verb, extra
):
    search, batches = Worker._search, []

    def interrupted(self, batch, options):
        batches.append(len(batch))
        if len(batches) == 5:
            raise KeyboardInterrupt
        return search(self, batch, options)

    monkeypatch.setattr(Worker, "_search", interrupted)
    monkeypatch.setattr(Batching, "lines", 3)  # a window; with --batch-tokens, a line a batch
    (tmp_path / "in").write_text("\n".join(sentences(9)))
    arguments = ("--input", str(tmp_path / "in"), "--batch-tokens=1", *SHORT, *extra)
    code, out, err = writehead(verb, *arguments)
    assert (code, out.count(b"\n")) == (130, 3)
    assert err == (
        "interrupted: 3 of 4 decoded lines are written; the others are lost, since lines read "
        "together are written together\n"
    )
    batches.clear()
    code, out, err = writehead(verb, *arguments, "--output", str(tmp_path / "out"))
    assert (code, out) == (130, b"")
    assert err.startswith("interrupted: 4 lines were decoded; ")
    assert err.endswith("/out was not made, since it comes whole\n")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    batches.clear()
    (tmp_path / "out").write_text("of before")
    err = writehead(verb, *arguments, "--output", str(tmp_path / "out"), "--force")[2]
    assert err.endswith("/out is left as it was, since it comes whole\n")
    assert (tmp_path / "out").read_text() == "of before"


@pytest.mark.parametrize(
    ("told", "shown"), [(1, "0.333 lines,"), (3, "1 lines,"), (3702, "1,234 lines,")]
)
def test_the_counter_shows_parts_of_long_lines(monkeypatch, capsys, told, shown):
    monkeypatch.setenv("FORCE_COLOR", "1")
    with textio.counting(True) as tell:
        for _ in range(told):
            tell(1 / 3)
    assert shown in capsys.readouterr().err


def test_a_long_line_is_said_and_a_reader_who_leaves_early_is_no_error(runs, tmp_path):
    # more line ends than a pipe holds, so that the writer must notice
    (tmp_path / "lines").write_text("the cat runs. " * 20 + "\n" * 100_000, encoding="utf-8")
    command = [sys.executable, "-m", "writehead", "translate", str(runs / "translation")]
    with subprocess.Popen(
        [*command, "--input", str(tmp_path / "lines"), *SHORT],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        first = process.stdout.readline()
        process.stdout.close()
        said = process.stderr.read().decode()
    assert process.returncode == 0
    assert len(first) > 1
    assert said == (
        "line 1 is longer than the 23 tokens that the model reads; it is translated in 20 pieces\n"
    )
