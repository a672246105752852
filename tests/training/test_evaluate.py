"""Scores: likelihood against a loop over single tokens, BLEU against sacrebleu's own function."""

import json
import math
import os
import shutil
from dataclasses import replace

import pytest
import sacrebleu
import torch

from texts import engine, sentences, tokenizer
from trainings import CONFIG, LANGUAGE, go
from writehead.data.dataset import Dataset
from writehead.engine import Engine
from writehead.errors import DataError
from writehead.interop.pretrained import RunFacts
from writehead.training import evaluate
from writehead.training.evaluate import SEARCHES, bleu, text_likelihood

CPU, EOS = "--device=cpu", 1
SOURCES, REFERENCES = sentences(9, seed=1, longest=4), sentences(9, seed=2, longest=5)
LONG = " ".join(["the small bird sings"] * 30)


@pytest.fixture(scope="module")
def engines() -> dict[str, Engine]:
    return {task: engine(task) for task in ("translation", "language")}


@pytest.fixture
def runs(tmp_path, monkeypatch, small_runs):
    """The current folder, with a run per task and the files a and b."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(small_runs, tmp_path, dirs_exist_ok=True)
    for name, lines in (("a", SOURCES), ("b", REFERENCES)):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
    return tmp_path


@torch.no_grad()
def slow_nll(made: Engine, lines: list[str], sources: list[str] | None = None) -> tuple[float, int]:
    """The negative log-likelihood of texts, one token at a time, and the number of tokens."""
    total, count = 0.0, 0
    for number, line in enumerate(lines):
        ids, given = [*tokenizer().encode(line), EOS], []
        if sources is not None:
            given = [torch.tensor([[*tokenizer().encode(sources[number]), EOS]])]
        for i, token in enumerate(ids):
            logits = made.model(*given, torch.tensor([[0, *ids[:i]]]))
            total -= float(logits[0, -1].log_softmax(-1)[token])
        count += len(ids)
    return total, count


def test_likelihood_and_perplexity_are_those_of_a_loop_over_tokens(engines):
    pairs = engines["translation"], [*REFERENCES, "a."], [*SOURCES, LONG]
    found = text_likelihood(*pairs)
    total, tokens = slow_nll(engines["translation"], REFERENCES, SOURCES)
    assert (found.tokens, found.skipped) == (tokens, 1)
    assert found.nll == pytest.approx(total, rel=1e-5)
    with pytest.raises(DataError, match="no line to score"):
        text_likelihood(engines["translation"], ["a."], [LONG])
    writer = engines["language"]
    scores = evaluate.evaluate_text(writer, ["the cat runs.", "", "a  dog", "   ", "now."])
    total, tokens = slow_nll(writer, ["the cat runs.", "a  dog", "now."])
    # words are separated by spaces, and the end of a line counts as one
    assert (scores["words"], scores["lines"], scores["tokens"]) == (4 + 3 + 2, 3, tokens)
    assert scores["ln_ppl"] == pytest.approx(total / tokens, rel=1e-5)
    assert scores["ppl_per_word"] == pytest.approx(math.exp(total / 9), rel=1e-5)
    length = len(tokenizer().encode(LONG)) + 1  # text longer than the positions is cut, not skipped
    assert text_likelihood(writer, [LONG]).tokens == length > writer.model.config.target_positions


def test_bleu_is_sacrebleus(engines):
    outputs = ["The cat, small and red, sees it.", "„Nein!“ sagt er — 3,5 Mal.", "a dog"]
    references = ["The cat, big and red, sees it.", "„Nein!“ sagte er — 3,5 Mal.", "a dog runs now"]
    scores = bleu(outputs, references)
    for name in ("intl", "13a"):
        expected = sacrebleu.corpus_bleu(outputs, [references], tokenize=name).score
        assert 0 < scores[name] == pytest.approx(expected)
        assert f"tok:{name}" in scores[f"{name}_signature"]
        assert bleu(references, references)[name] <= 100.0  # sacrebleu's sum is above
    scores = evaluate.evaluate_translation(engines["translation"], SOURCES, REFERENCES)["bleu"]
    assert list(scores) == ["greedy", "beam-4"]
    for name, found in scores.items():
        outputs = engines["translation"].translate(SOURCES, SEARCHES[name])
        assert found == bleu([output.text for output in outputs], REFERENCES)
    with pytest.raises(DataError, match="scored on text"):
        evaluate.evaluate_translation(engines["language"], SOURCES, REFERENCES)


def test_the_command_prints_a_table_and_writes_json(runs, writehead):
    command = ("evaluate", "translation", "--source=a", "--reference=b", "--search=greedy", CPU)
    code, out, _ = writehead(*command, "--output=s.json")
    written = json.loads((runs / "s.json").read_text())
    for name in ("intl_signature", "13a_signature"):  # whole, without a terminal to fold for
        assert (code, written["bleu"]["greedy"][name] in out) == (0, True)
    assert writehead(*command, "--output=s.json")[0] == 2
    assert json.loads((runs / "s.json").read_text()) == written
    assert writehead(*command, "--output=s.json", "--force")[0] == 0
    run = runs / "translation"
    loaded = Engine.load(run, "cpu")
    for found in (json.loads(writehead(*command, "--json")[1]), written):
        expected = text_likelihood(loaded, REFERENCES, SOURCES).ln_ppl
        assert found["ln_ppl"] == pytest.approx(expected)
        assert found["versions"]["torch"] == torch.__version__
        facts = RunFacts.read(run)
        assert (found["fingerprint"], found["quantization"]) == (facts.fingerprint, None)
        assert found["bytes"] == facts.bytes
        assert found["command"].startswith("writehead evaluate")


def test_an_infinite_perplexity_is_null_in_json(runs, writehead):
    (runs / "long").write_text("x" * 2_000)
    command = ("evaluate", "language", "--text=long", CPU)
    code, out, _ = writehead(*command, "--output=s.json")
    assert (code, "perplexity" in out, "inf" in out) == (0, True, True)
    for text in (writehead(*command, "--json")[1], (runs / "s.json").read_text()):
        scores = json.loads(text, parse_constant=pytest.fail)  # Infinity and NaN are not JSON
        assert (scores["ppl_per_word"], scores["ln_ppl"] > 1) == (None, True)


def test_a_split_of_a_dataset_is_scored_as_its_lines_are(dataset, text, tmp_path, writehead):
    go(dataset, tmp_path / "run", replace(CONFIG, steps=2))
    data = Dataset.open(dataset)
    split, files = data.split("dev"), []
    for option, side in (("--source", split.source), ("--reference", split.target)):
        lines = [data.tokenizer.decode(side[i]) for i in range(len(split))]
        (tmp_path / option).write_text("\n".join(lines))
        files += [option, tmp_path / option]
    command = ("evaluate", tmp_path / "run", "--search=greedy", "--json", CPU)
    by_files = json.loads(writehead(*command, *files)[1])
    by_split = json.loads(writehead(*command, "--dataset", dataset, "--split=dev")[1])
    assert by_split["tokens"] == len(split.sides["target"].tokens) + len(split)  # with the ends
    assert by_split["ln_ppl"] == pytest.approx(by_files["ln_ppl"])
    for name in ("sentences", "tokens", "bleu"):
        assert by_split[name] == by_files[name]
    assert "--split dev" in writehead(*command, "--dataset", dataset)[2]
    go(text, tmp_path / "language", replace(CONFIG, steps=2), LANGUAGE)
    command = ("evaluate", tmp_path / "language", "--json", "--dataset", text, "--split=dev", CPU)
    assert json.loads(writehead(*command)[1])["lines"] == len(Dataset.open(text).split("dev"))


def test_the_bundled_model_is_scored_without_a_run(bundled, runs, writehead):
    given = ("--source=a", "--reference=b", CPU, "--json")
    answers = [json.loads(writehead("evaluate", *run, *given)[1]) for run in ((), (bundled,))]
    assert {answer["run"] for answer in answers} == {"writehead/bundled/en-de"}
    assert answers[0]["bleu"] == answers[1]["bleu"]
    assert answers[0]["quantization"]["bits"] == 8


@pytest.mark.parametrize(
    ("name", "given", "link"),
    [
        ("b", ("--source=a", "--reference=b"), os.link),
        ("translation/model.safetensors", ("--source=a", "--reference=b"), os.symlink),
        ("a", ("--text=a",), None),
        ("data/dataset.json", ("--dataset=data",), os.symlink),
    ],
)
def test_an_input_is_not_overwritten(runs, dataset, refused, name, given, link):
    shutil.copytree(dataset, runs / "data")
    before = (runs / name).read_bytes()
    if link is not None:
        link(runs / name, runs / "link")
    output = ("--output", name if link is None else "link", "--force")
    assert "is an input" in refused("evaluate", "translation", *given, CPU, *output)
    assert (runs / name).read_bytes() == before


def test_a_named_test_set_is_read_line_by_line(tmp_path, monkeypatch):
    for name, text in (("en", "a\u2028b\nc\n"), ("de", "d\ne\n")):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr("sacrebleu.get_source_file", lambda *_: str(tmp_path / "en"))
    monkeypatch.setattr("sacrebleu.get_reference_files", lambda *_: [str(tmp_path / "de")])
    assert evaluate.named_test_set("wmt14") == (["a\u2028b", "c"], ["d", "e"])
