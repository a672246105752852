import json
import re
import shutil

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


def test_quantize_makes_a_smaller_run_and_says_by_how_much(writehead, folder, tmp_path):
    code, out, err = writehead("quantize", folder / "translation", tmp_path / "small", "--bits=6")
    assert (code, out, err.count("\n")) == (0, "", 1)
    said = re.search(r"small: ([\d,]+) bytes are now ([\d,]+), in 6 bits with a scale for 32", err)
    sizes = [
        sum(path.stat().st_size for path in run.iterdir() if path.suffix != ".sha256")
        for run in (folder / "translation", tmp_path / "small")
    ]
    assert [int(figure.replace(",", "")) for figure in said.groups()] == sizes
    assert sizes[1] < sizes[0] / 2
    assert re.search(r"largest relative error \d\.\d\d%, of \w+\.", err)


@pytest.mark.parametrize(
    ("options", "bits", "group", "said"),
    [
        ([], 8, None, "in 8 bits with a scale a row"),
        (["--bits=4"], 4, 32, "in 4 bits with a scale for 32 columns"),
        (["--bits=5", "--group=0"], 5, None, "in 5 bits with a scale a row"),
        (["--bits=8", "--group=7"], 8, 7, "in 8 bits with a scale for 7 columns"),
    ],
)
def test_bits_and_groups_are_as_asked(writehead, folder, tmp_path, options, bits, group, said):
    code, _, err = writehead("quantize", folder / "language", tmp_path / "small", *options)
    assert code == 0
    assert said in err
    config = read_quantization(tmp_path / "small")
    assert (config.bits, config.group) == (bits, group)


def test_the_verbs_that_read_a_run_read_a_quantized_one(writehead, folder, tmp_path):
    small = tmp_path / "small"
    writehead("quantize", folder / "translation", small)
    save_run(tmp_path / "same", load_run(small).model, tokenizer=small / "tokenizer.model")
    (tmp_path / "text").write_text("\n".join(sentences(5)) + "\n")
    text = ("--source", tmp_path / "text", "--reference", tmp_path / "text", "--device=cpu")
    translated, scored = [], []
    for run in (small, tmp_path / "same"):
        short = ("--max-length=9", "--device=cpu", "--scores")
        translated.append(writehead("translate", run, "--input", tmp_path / "text", *short))
        scored.append(json.loads(writehead("evaluate", run, *text, "--json")[1])["ln_ppl"])
    assert translated[0] == translated[1]
    assert translated[0][0] == 0
    assert scored[0] == scored[1]
    assert writehead("explain", small, "--source=8", "--target=8")[0] == 0

    writehead("quantize", folder / "language", tmp_path / "lm")
    assert writehead("generate", tmp_path / "lm", "the cat", "--device=cpu")[0] == 0


def test_a_checkpoint_is_quantized_without_what_only_training_needs(writehead, folder, tmp_path):
    checkpoint = tmp_path / "training" / "checkpoints" / "step-00000007"
    shutil.copytree(folder / "translation", checkpoint)
    (checkpoint / "optimizer.safetensors").write_bytes(b"moments")
    code, _, err = writehead("quantize", tmp_path / "training", tmp_path / "small")
    assert (code, "has not finished training; train on, or load its last" in err) == (2, True)
    assert writehead("quantize", checkpoint, tmp_path / "small")[0] == 0
    names = sorted(path.name for path in (tmp_path / "small").iterdir())
    weights = "model.safetensors"
    assert names == ["checksums.sha256", "config.json", weights, "tokenizer.model"]


def test_a_run_that_is_there_is_replaced_if_forced_and_kept_if_it_holds_more(
    writehead, folder, tmp_path
):
    place = tmp_path / "small"
    for bits in (8, 4):
        command = ("quantize", folder / "language", place, f"--bits={bits}", "--force")
        assert writehead(*command)[0] == 0
        assert read_quantization(place).bits == bits
    (place / "notes").write_text("mine")
    code, _, err = writehead(*command)
    assert (code, "holds more than a run (notes)" in err) == (2, True)
    assert (place / "notes").read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nowhere", "new"), "there is no run at nowhere"),
        (("run", "run"), "run exists; choose another place, or pass --force to replace it"),
        (("run", "run", "--force"), "run is what is read; choose another place"),
        (("run", ".", "--force"), ". is not a run, so it is not overwritten"),
        (("run", "new", "--bits=7"), "bits=7 are not offered; choose 8, 6, 5 or 4"),
        (("run", "new", "--group=-1"), "group=-1 must be 0, for whole rows"),
        (("small", "new"), "small is in 8 bits already; quantize the run that it was made from"),
        (("run", "run/config.json/new"), "could not be written"),
    ],
)
def test_what_cannot_be_quantized_is_one_line_and_exit_code_2(
    writehead, folder, tmp_path, monkeypatch, arguments, words
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder / "language", "run")
    writehead("quantize", "run", "small")
    code, out, err = writehead("quantize", *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "small"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "run has no tokenizer.model, so the new run would know no text"),
        (b"no pieces", "run/tokenizer.model is not a sentencepiece model"),
    ],
)
def test_a_tokenizer_that_cannot_be_read_is_told_before_the_work(
    writehead, folder, tmp_path, monkeypatch, content, words
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder / "language", "run")
    place = tmp_path / "run" / "tokenizer.model"
    place.unlink()
    if content is not None:
        place.write_bytes(content)

    def work(*given: object, **options: object) -> None:
        pytest.fail("the weights were read first")

    monkeypatch.setattr("writehead.model.quantize.read_weights", work)
    code, out, err = writehead("quantize", "run", "new")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
