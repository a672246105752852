"""`writehead quantize`: a smaller run that every command reads."""

import json
import shutil
from operator import lt
from pathlib import Path

import pytest

from texts import sentences
from writehead.model import load_run, save_run
from writehead.model.runs import read_quantization


def test_quantize_makes_a_smaller_run_and_replaces_one_if_forced(writehead, small_runs, tmp_path):
    plain, small = small_runs / "translation", tmp_path / "small"
    for options, bits, group in (
        ([], 8, None),
        (["--bits=4"], 4, 32),
        (["--bits=5", "--group=0"], 5, None),
    ):
        code, out, err = writehead("quantize", plain, small, *options, "--force")
        assert (code, out, err.count("\n")) == (0, "", 1)
        config = read_quantization(small)
        assert (config.bits, config.group) == (bits, group)
        assert lt(*((run / "model.safetensors").stat().st_size for run in (small, plain)))


def test_other_commands_read_a_quantized_run(writehead, small_runs, tmp_path):
    small, text = small_runs / "quantized", tmp_path / "text"
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
    writehead("quantize", small_runs / "language", tmp_path / "lm")
    assert writehead("generate", tmp_path / "lm", "the cat", "--device=cpu")[0] == 0
    assert writehead("explain", tmp_path / "lm", "--target=8")[0] == 0


def test_a_checkpoint_is_quantized_without_optimizer_state(writehead, small_runs, tmp_path):
    checkpoint = tmp_path / "training" / "checkpoints" / "step-00000007"
    shutil.copytree(small_runs / "translation", checkpoint)
    (checkpoint / "optimizer.safetensors").write_bytes(b"moments")
    code, _, err = writehead("quantize", tmp_path / "training", tmp_path / "small")
    assert (code, "step-00000007" in err) == (2, True)
    assert writehead("quantize", checkpoint, tmp_path / "small")[0] == 0
    names = sorted(path.name for path in (tmp_path / "small").iterdir())
    assert names == ["checksums.sha256", "config.json", "model.safetensors", "tokenizer.model"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nowhere", "new"), "there is no run at nowhere"),
        (("run", "run"), "run exists"),
        (("run", "run", "--force"), "choose another folder"),
        (("run", ".", "--force"), ". is not a run and is not overwritten"),
        (("run", "small", "--force"), "more than a run"),
        (("run", "new", "--bits=7"), "bits=7"),
        (("run", "new", "--group=-1"), "group=-1"),
        (("small", "new"), "small already has 8 bits"),
        (("run", "run/config.json/new"), "could not be written"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(
    refused, small_runs, tmp_path, monkeypatch, arguments, words
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(small_runs / "translation", "run")
    shutil.copytree(small_runs / "quantized", "small")
    Path("small", "notes").write_text("mine")
    assert words in refused("quantize", *arguments)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "small"]
