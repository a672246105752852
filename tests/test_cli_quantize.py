"""`writehead quantize`: a smaller run that every command reads."""

import json
import shutil
from operator import lt

import pytest

from texts import engine, sentences, tokenizer
from writehead.model import load_run, save_run
from writehead.model.runs import read_quantization


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the runs `translation` and `language`."""
    folder = tmp_path_factory.mktemp("runs")
    tokenizer().save(folder / "tokenizer")
    for task in ("translation", "language"):
        save_run(folder / task, engine(task).model.float(), tokenizer=folder / "tokenizer")
    return folder


@pytest.mark.parametrize(
    ("options", "bits", "group"),
    [([], 8, None), (["--bits=4"], 4, 32), (["--bits=5", "--group=0"], 5, None)],
)
def test_quantize_makes_a_smaller_run(writehead, folder, tmp_path, options, bits, group):
    small = tmp_path / "small"
    code, out, err = writehead("quantize", folder / "translation", small, *options)
    assert (code, out, err.count("\n")) == (0, "", 1)
    config = read_quantization(small)
    assert (config.bits, config.group) == (bits, group)
    weights = (run / "model.safetensors" for run in (small, folder / "translation"))
    assert lt(*(path.stat().st_size for path in weights))


def test_other_commands_read_a_quantized_run(writehead, folder, tmp_path):
    small, text = tmp_path / "small", tmp_path / "text"
    writehead("quantize", folder / "translation", small)
    save_run(tmp_path / "same", load_run(small).model, tokenizer=small / "tokenizer.model")
    text.write_text("\n".join(sentences(5)) + "\n")
    scored = ("--source", text, "--reference", text, "--device=cpu", "--json")
    translated, losses = [], []
    for run in (small, tmp_path / "same"):
        short = ("--max-length=9", "--device=cpu", "--scores")
        translated.append(writehead("translate", run, "--input", text, *short))
        losses.append(json.loads(writehead("evaluate", run, *scored)[1])["ln_ppl"])
    assert translated[0] == translated[1]
    assert translated[0][0] == 0
    assert losses[0] == losses[1]
    assert writehead("explain", small, "--source=8", "--target=8")[0] == 0
    writehead("quantize", folder / "language", tmp_path / "lm")
    assert writehead("generate", tmp_path / "lm", "the cat", "--device=cpu")[0] == 0


def test_a_checkpoint_is_quantized_without_optimizer_state(writehead, folder, tmp_path):
    checkpoint = tmp_path / "training" / "checkpoints" / "step-00000007"
    shutil.copytree(folder / "translation", checkpoint)
    (checkpoint / "optimizer.safetensors").write_bytes(b"moments")
    code, _, err = writehead("quantize", tmp_path / "training", tmp_path / "small")
    assert (code, "step-00000007" in err) == (2, True)
    assert writehead("quantize", checkpoint, tmp_path / "small")[0] == 0
    names = sorted(path.name for path in (tmp_path / "small").iterdir())
    assert names == ["checksums.sha256", "config.json", "model.safetensors", "tokenizer.model"]


def test_force_replaces_a_run_but_not_other_files(writehead, folder, tmp_path):
    place = tmp_path / "small"
    for bits in (8, 4):
        command = ("quantize", folder / "language", place, f"--bits={bits}", "--force")
        assert writehead(*command)[0] == 0
        assert read_quantization(place).bits == bits
    (place / "notes").write_text("mine")
    code, _, err = writehead(*command)
    assert (code, "more than a run" in err) == (2, True)
    assert (place / "notes").read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nowhere", "new"), "there is no run at nowhere"),
        (("run", "run"), "run exists"),
        (("run", "run", "--force"), "choose another folder"),
        (("run", ".", "--force"), ". is not a run and is not overwritten"),
        (("run", "new", "--bits=7"), "bits=7"),
        (("run", "new", "--group=-1"), "group=-1"),
        (("small", "new"), "small already has 8 bits"),
        (("run", "run/config.json/new"), "could not be written"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(
    writehead, folder, tmp_path, monkeypatch, arguments, words
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder / "language", "run")
    writehead("quantize", "run", "small")
    code, out, err = writehead("quantize", *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "small"]
