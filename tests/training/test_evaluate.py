"""Scores: likelihood against a loop over single tokens, BLEU against sacrebleu's own function."""

import json
import math
import urllib.error
from dataclasses import replace

import pytest
import sacrebleu
import torch

from texts import engine, sentences, tokenizer
from trainings import CONFIG, LANGUAGE, go
from writehead.data.dataset import Dataset
from writehead.decoding import Engine
from writehead.errors import DataError
from writehead.model import save_run
from writehead.training.evaluate import (
    SEARCHES,
    bleu,
    evaluate_text,
    evaluate_translation,
    named_test_set,
    text_likelihood,
)

END = 1
SOURCES = sentences(9, seed=1, longest=4)
REFERENCES = sentences(9, seed=2, longest=5)
LONG = " ".join(["the small bird sings"] * 30)


@pytest.fixture(scope="module")
def translator() -> Engine:
    return engine("translation")


@pytest.fixture(scope="module")
def writer() -> Engine:
    return engine("language")


@pytest.fixture
def runs(tmp_path, monkeypatch, translator, writer):
    """Runs `translator` and `writer`, and the files a, b, short and empty beside them."""
    monkeypatch.chdir(tmp_path)
    tokenizer().save(tmp_path / "tokens")
    for name, made in (("translator", translator), ("writer", writer)):
        save_run(tmp_path / name, made.model, tokenizer=tmp_path / "tokens")
    for name, lines in (("a", SOURCES), ("b", REFERENCES), ("short", SOURCES[1:]), ("empty", [])):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
    return tmp_path


@torch.no_grad()
def slow_nll(made: Engine, line: str, source: str | None = None) -> tuple[float, int]:
    """The negative log-likelihood of a text, one token at a time, and the number of tokens."""
    ids = [*tokenizer().encode(line), END]
    given = () if source is None else (torch.tensor([[*tokenizer().encode(source), END]]),)
    total = 0.0
    for i, token in enumerate(ids):
        logits = made.model(*given, torch.tensor([[0, *ids[:i]]]))
        total -= float(logits[0, -1].log_softmax(-1)[token])
    return total, len(ids)


def test_the_likelihood_of_pairs_is_that_of_a_loop_over_tokens(translator):
    found = text_likelihood(translator, [*REFERENCES, "a."], [*SOURCES, LONG])
    each = [slow_nll(translator, *pair) for pair in zip(REFERENCES, SOURCES, strict=True)]
    assert (found.tokens, found.skipped) == (sum(count for _, count in each), 1)
    assert found.nll == pytest.approx(sum(nll for nll, _ in each), rel=1e-5)
    assert found.ln_ppl == found.nll / found.tokens
    with pytest.raises(DataError, match="longer"):
        text_likelihood(translator, ["a."], [LONG])


def test_words_are_separated_by_spaces_and_every_line_ends_with_one(writer):
    lines = ["the cat runs.", "", "a  dog", "   ", "now."]
    each = [slow_nll(writer, line) for line in lines if line.strip()]
    scores, total = evaluate_text(writer, lines), sum(nll for nll, _ in each)
    tokens = sum(count for _, count in each)
    assert (scores["words"], scores["lines"], scores["tokens"]) == (4 + 3 + 2, 3, tokens)
    assert scores["ln_ppl"] == pytest.approx(total / tokens, rel=1e-5)
    assert scores["ppl_per_word"] == pytest.approx(math.exp(total / 9), rel=1e-5)
    assert len(tokenizer().encode(LONG)) > writer.model.config.target_positions
    assert text_likelihood(writer, [LONG]).tokens == len(tokenizer().encode(LONG)) + 1


@pytest.mark.parametrize("tokenization", ["intl", "13a"])
def test_bleu_is_sacrebleus(tokenization):
    outputs = ["The cat, small and red, sees it.", "„Nein!“ sagt er — 3,5 Mal.", "a dog"]
    references = ["The cat, big and red, sees it.", "„Nein!“ sagte er — 3,5 Mal.", "a dog runs now"]
    scores = bleu(outputs, references)
    expected = sacrebleu.corpus_bleu(outputs, [references], tokenize=tokenization).score
    assert 0 < scores[tokenization] == pytest.approx(expected)
    assert f"tok:{tokenization}" in scores[f"{tokenization}_signature"]


def test_a_translation_is_scored_with_each_search(translator, writer):
    scores = evaluate_translation(translator, SOURCES, REFERENCES)
    assert list(scores["bleu"]) == ["greedy", "beam-4"]
    for name, found in scores["bleu"].items():
        outputs = [one.text for one in translator.translate(SOURCES, SEARCHES[name])]
        assert found == bleu(outputs, REFERENCES)
    with pytest.raises(DataError, match="scored on text"):
        evaluate_translation(writer, SOURCES, REFERENCES)


def test_the_command_prints_a_table_and_writes_json(runs, writehead, monkeypatch):
    command = ("evaluate", "translator", "--source=a", "--reference=b", "--device=cpu")
    command = (*command, "--search=greedy")
    code, out, _ = writehead(*command, "--output=s.json")
    assert code == 0
    written = json.loads((runs / "s.json").read_text())
    lines = {" ".join(line.split()) for line in out.splitlines()}
    for name in ("intl_signature", "13a_signature"):  # whole, without a terminal to fold for
        assert any(line.endswith(written["bleu"]["greedy"][name]) for line in lines)
    assert writehead(*command, "--output=s.json")[0] == 2
    assert json.loads((runs / "s.json").read_text()) == written
    assert writehead(*command, "--output=s.json", "--force")[0] == 0
    printed = json.loads(writehead(*command, "--json")[1])
    loaded = Engine.load(runs / "translator", "cpu")
    expected = text_likelihood(loaded, REFERENCES, SOURCES).ln_ppl
    for found in (printed, written):
        assert found["ln_ppl"] == pytest.approx(expected)
        assert found["versions"]["torch"] == torch.__version__
        assert found["command"].startswith("writehead evaluate")

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("writehead.training.evaluate.evaluate_translation", interrupt)
    code, out, err = writehead(*command, "--output=other.json")
    assert (code, out, "interrupted" in err) == (130, "", True)
    assert not (runs / "other.json").exists()


def test_an_infinite_perplexity_is_null_in_json(runs, writehead):
    (runs / "long").write_text("x" * 2_000)
    command = ("evaluate", "writer", "--text=long", "--device=cpu")
    code, out, _ = writehead(*command, "--output=s.json")
    assert (code, "perplexity" in out, "inf" in out) == (0, True, True)
    for text in (writehead(*command, "--json")[1], (runs / "s.json").read_text()):
        scores = json.loads(text, parse_constant=pytest.fail)  # Infinity and NaN are not JSON
        assert scores["ppl_per_word"] is None
        assert scores["ln_ppl"] > 1


def test_a_split_of_a_dataset_is_scored_as_its_lines_are(dataset, text, tmp_path, writehead):
    go(dataset, tmp_path / "run", replace(CONFIG, steps=2))
    data = Dataset.open(dataset)
    split = data.split("dev")
    for side, ids in (("source", split.source), ("target", split.target)):
        lines = [data.tokenizer.decode(ids(i)) for i in range(len(split))]
        (tmp_path / side).write_text("\n".join(lines))
    command = ("evaluate", tmp_path / "run", "--search=greedy", "--json", "--device=cpu")
    files = ("--source", tmp_path / "source", "--reference", tmp_path / "target")
    by_files = json.loads(writehead(*command, *files)[1])
    by_split = json.loads(writehead(*command, "--dataset", dataset, "--split=dev")[1])
    assert by_split["on"] == f"{dataset}, dev"
    assert by_split["tokens"] == len(split.sides["target"].tokens) + len(split)  # with the ends
    assert by_split["ln_ppl"] == pytest.approx(by_files["ln_ppl"])
    for name in ("sentences", "tokens", "bleu"):
        assert by_split[name] == by_files[name]
    code, _, err = writehead(*command, "--dataset", dataset)
    assert (code, "no split 'test', only train and dev" in err) == (2, True)
    go(text, tmp_path / "writer", replace(CONFIG, steps=2), LANGUAGE)
    code, out, _ = writehead("evaluate", tmp_path / "writer", "--dataset", text, "--split=dev")
    assert (code, "perplexity" in out) == (0, True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "give --source with --reference"),
        (["--dataset=a", "--text=a"], "one of them"),
        (["--split=dev", "--text=a"], "--split is a dataset's"),
        (["--source=a"], "give --source with --reference"),
        (["--source=a", "--reference=short"], "9 source lines and 8 reference lines"),
        (["--source=empty", "--reference=empty"], "no line to score"),
        (["--source=none", "--reference=b"], "cannot be read"),
        (["--text=a"], "scored on pairs"),
        (["--source=a", "--reference=b", "--search=beam-5"], "did you mean 'beam-4'?"),
        (["--test-set=wmt-14"], "did you mean 'wmt14'?"),
        (["--test-set=wmt14"], "could not be fetched"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(runs, monkeypatch, writehead, options, words):
    def unreachable(*_, **__):
        raise urllib.error.URLError("no network here")

    monkeypatch.setattr("writehead.training.evaluate.get_source_file", unreachable)
    code, _, err = writehead("evaluate", "translator", *options, "--device=cpu")
    assert (code, "Traceback" in err) == (2, False)
    assert words in err.replace("\n", " ")


def test_a_named_test_set_is_read_line_by_line(tmp_path, monkeypatch):
    def exits(*_):
        raise SystemExit(1)  # as sacrebleu does where it cannot fetch

    for name, text in (("en", "a\u2028b\nc\n"), ("de", "d\ne\n")):
        (tmp_path / name).write_text(text)
    room = "writehead.training.evaluate"
    monkeypatch.setattr(f"{room}.get_source_file", lambda *_: str(tmp_path / "en"))
    monkeypatch.setattr(f"{room}.get_reference_files", lambda *_: [str(tmp_path / "de")])
    assert named_test_set("wmt14") == (["a\u2028b", "c"], ["d", "e"])
    monkeypatch.setattr(f"{room}.get_source_file", exits)
    with pytest.raises(DataError, match="could not be fetched"):
        named_test_set("wmt13")
