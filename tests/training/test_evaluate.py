"""Scores: the likelihood by a loop over single sequences, BLEU by sacrebleu's own function."""

import json
import math
import sys
import urllib.error
from dataclasses import replace

import pytest
import sacrebleu
import torch

from texts import engine, sentences, tokenizer
from trainings import CONFIG, LANGUAGE, go
from writehead.cli import main
from writehead.data.dataset import Dataset
from writehead.decoding import Engine
from writehead.errors import ConfigError, DataError
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


@pytest.fixture(scope="module")
def translator() -> Engine:
    return engine("translation")


@pytest.fixture(scope="module")
def writer() -> Engine:
    return engine("language")


@pytest.fixture
def run(tmp_path, translator):
    tokenizer().save(tmp_path / "tokens")
    save_run(tmp_path / "run", translator.model, tokenizer=tmp_path / "tokens")
    return tmp_path / "run"


@torch.no_grad()
def slow_nll(made: Engine, line: str, source: str | None = None) -> tuple[float, int]:
    """The negative log-likelihood of one text, a token at a time, and how many there are."""
    ids = [*tokenizer().encode(line), END]
    given = () if source is None else (torch.tensor([[*tokenizer().encode(source), END]]),)
    total = 0.0
    for i, token in enumerate(ids):
        logits = made.model(*given, torch.tensor([[0, *ids[:i]]]))
        total -= float(logits[0, -1].log_softmax(-1)[token])
    return total, len(ids)


def test_the_likelihood_of_pairs_is_that_of_a_loop_over_tokens(translator):
    found = text_likelihood(translator, REFERENCES, SOURCES)
    each = [slow_nll(translator, *pair) for pair in zip(REFERENCES, SOURCES, strict=True)]
    assert found.tokens == sum(count for _, count in each)
    assert found.nll == pytest.approx(sum(nll for nll, _ in each), rel=1e-5)
    assert found.ln_ppl == found.nll / found.tokens


def test_perplexity_a_word_counts_what_spaces_part_and_line_ends(writer):
    lines = ["the cat runs.", "", "a  dog", "   ", "now."]
    each = [slow_nll(writer, line) for line in lines if line.strip()]
    scores = evaluate_text(writer, lines)
    assert scores["words"] == (3 + 1) + (2 + 1) + (1 + 1)
    assert scores["lines"] == 3
    assert scores["tokens"] == sum(count for _, count in each)
    total = sum(nll for nll, _ in each)
    assert scores["ln_ppl"] == pytest.approx(total / scores["tokens"], rel=1e-5)
    assert scores["ppl_per_word"] == pytest.approx(math.exp(total / 9), rel=1e-5)


def test_the_perplexity_of_a_very_long_word_is_infinite_and_its_json_valid(
    tmp_path, writer, writehead
):
    word = "x" * 2_000
    assert evaluate_text(writer, [word])["ppl_per_word"] == math.inf
    tokenizer().save(tmp_path / "tokens")
    save_run(tmp_path / "run", writer.model, tokenizer=tmp_path / "tokens")
    (tmp_path / "text").write_text(word)
    command = ("evaluate", tmp_path / "run", "--text", tmp_path / "text", "--device=cpu")
    code, out, _ = writehead(*command, "--output", tmp_path / "s.json")
    assert (code, "inf" in out) == (0, True)
    code, out, _ = writehead(*command, "--json")
    assert code == 0
    for given in (out, (tmp_path / "s.json").read_text()):
        scores = json.loads(given, parse_constant=pytest.fail)  # Infinity and NaN are not JSON
        assert scores["ppl_per_word"] is None
        assert scores["ln_ppl"] > 1


def test_text_longer_than_the_positions_is_scored_whole(writer):
    line = " ".join(["the small bird sings"] * 30)
    assert len(tokenizer().encode(line)) > writer.model.config.target_positions
    assert text_likelihood(writer, [line]).tokens == len(tokenizer().encode(line)) + 1


def test_pairs_longer_than_the_positions_are_counted_as_left_out(translator):
    long = " ".join(["the small bird sings"] * 30)
    found = text_likelihood(translator, [*REFERENCES, "a."], [*SOURCES, long])
    assert found.skipped == 1
    assert found.nll == text_likelihood(translator, REFERENCES, SOURCES).nll
    with pytest.raises(DataError, match="every pair is longer"):
        text_likelihood(translator, ["a."], [long])


@pytest.mark.parametrize("tokenization", ["intl", "13a"])
def test_bleu_is_sacrebleus(tokenization):
    outputs = ["The cat, small and red, sees it.", "„Nein!“ sagt er — 3,5 Mal.", "a dog"]
    references = ["The cat, big and red, sees it.", "„Nein!“ sagte er — 3,5 Mal.", "a dog runs now"]
    scores = bleu(outputs, references)
    expected = sacrebleu.corpus_bleu(outputs, [references], tokenize=tokenization).score
    assert 0 < scores[tokenization] == pytest.approx(expected)
    assert f"tok:{tokenization}" in scores[f"{tokenization}_signature"]


def test_a_translation_is_scored_by_each_search(translator):
    scores = evaluate_translation(translator, SOURCES, REFERENCES)
    assert list(scores["bleu"]) == ["greedy", "beam-4"]
    for name, found in scores["bleu"].items():
        outputs = [one.text for one in translator.translate(SOURCES, SEARCHES[name])]
        assert found == bleu(outputs, REFERENCES)
    one = evaluate_translation(translator, SOURCES, REFERENCES, ["greedy"])
    assert one["bleu"] == {"greedy": scores["bleu"]["greedy"]}


def test_a_model_is_scored_on_what_it_is_for(translator, writer):
    with pytest.raises(DataError, match="scored on pairs"):
        evaluate_text(translator, SOURCES)
    with pytest.raises(DataError, match="scored on text"):
        evaluate_translation(writer, SOURCES, REFERENCES)
    with pytest.raises(ConfigError, match="did you mean 'beam-4'"):
        evaluate_translation(translator, SOURCES, REFERENCES, ["beam4"])


def test_the_command_prints_a_table_and_writes_json(run, tmp_path, writehead):
    source, reference = tmp_path / "source", tmp_path / "reference"
    source.write_text("\n".join(SOURCES) + "\n")
    reference.write_text("\n".join(REFERENCES) + "\n")
    command = ("evaluate", run, "--source", source, "--reference", reference, "--device=cpu")
    code, out, _ = writehead(*command, "--search=greedy", "--output", tmp_path / "s.json")
    assert code == 0
    assert "BLEU, greedy" in out
    assert "tok:intl" in out
    written = json.loads((tmp_path / "s.json").read_text())
    code, _, err = writehead(*command, "--search=greedy", "--output", tmp_path / "s.json")
    assert (code, "s.json exists; choose another place, or pass --force" in err) == (2, True)
    assert json.loads((tmp_path / "s.json").read_text()) == written
    again = (*command, "--search=greedy", "--output", tmp_path / "s.json", "--force")
    assert writehead(*again)[0] == 0
    assert json.loads((tmp_path / "s.json").read_text())["command"].endswith("--force")
    code, out, _ = writehead(*command, "--search=greedy", "--json")
    printed = json.loads(out)
    assert code == 0
    timeless = ("date", "command")
    assert {k: v for k, v in printed.items() if k not in timeless} == {
        k: v for k, v in written.items() if k not in timeless
    }
    loaded = Engine.load(run, "cpu")
    assert printed["ln_ppl"] == text_likelihood(loaded, REFERENCES, SOURCES).ln_ppl
    assert printed["versions"]["torch"] == torch.__version__
    assert printed["command"].startswith("writehead evaluate")


def test_scoring_that_is_interrupted_says_what_is_left(run, tmp_path, monkeypatch, writehead):
    def interrupted(*_, **options):
        raise KeyboardInterrupt

    (tmp_path / "text").write_text("\n".join(SOURCES) + "\n")
    path, text = tmp_path / "s.json", tmp_path / "text"
    monkeypatch.setattr("writehead.training.evaluate.evaluate_translation", interrupted)
    command = ("evaluate", run, "--source", text, "--reference", text, "--device=cpu")
    code, out, err = writehead(*command, "--output", path)
    assert (code, out, path.exists()) == (130, "", False)
    assert err.endswith(f"interrupted; there is no result yet, and {path} was not made\n")


def test_a_signature_is_not_folded_where_there_is_no_terminal(run, tmp_path, monkeypatch, capsys):
    (tmp_path / "text").write_text("\n".join(SOURCES) + "\n")
    text = ("--source", tmp_path / "text", "--reference", tmp_path / "text", "--device=cpu")
    command = ["writehead", "evaluate", run, *text, "--output", tmp_path / "s.json"]
    monkeypatch.setattr(sys, "argv", [*map(str, command), "--search=greedy"])
    monkeypatch.setenv("COLUMNS", "60")
    with pytest.raises(SystemExit):
        main()
    scores = json.loads((tmp_path / "s.json").read_text())["bleu"]["greedy"]
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    for name in ("intl_signature", "13a_signature"):
        assert any(line.endswith(f" {scores[name]}") for line in lines)


def test_the_command_scores_text_with_a_language_model(tmp_path, writer, writehead):
    tokenizer().save(tmp_path / "tokens")
    save_run(tmp_path / "run", writer.model, tokenizer=tmp_path / "tokens")
    (tmp_path / "text").write_text("\n".join(SOURCES))
    code, out, _ = writehead("evaluate", tmp_path / "run", "--text", tmp_path / "text")
    assert code == 0
    assert "perplexity" in out
    assert "a word" in out


def test_a_split_of_a_dataset_is_scored_as_its_lines_are(dataset, tmp_path, writehead):
    go(dataset, tmp_path / "run", replace(CONFIG, steps=2))
    data = Dataset.open(dataset)
    split = data.split("dev")
    for side, ids in (("source", split.source), ("target", split.target)):
        lines = [data.tokenizer.decode(ids(i)) for i in range(len(split))]
        (tmp_path / side).write_text("\n".join(lines))
    command = ("evaluate", tmp_path / "run", "--search=greedy", "--json")
    files = ("--source", tmp_path / "source", "--reference", tmp_path / "target")
    by_files = json.loads(writehead(*command, *files)[1])
    code, out, _ = writehead(*command, "--dataset", dataset, "--split=dev")
    by_split = json.loads(out)
    assert code == 0
    assert by_split["on"] == f"{dataset}, dev"
    assert by_split["sentences"] == len(split) > 0
    # as many tokens as the dataset says, which have an end each
    assert by_split["tokens"] == len(split.sides["target"].tokens) + len(split)
    for name in ("sentences", "tokens", "ln_ppl", "bleu"):
        assert by_split[name] == by_files[name]
    code, _, err = writehead(*command, "--dataset", dataset)
    assert code == 2
    assert "has no split 'test', only train and dev; ask for one of these, or give files" in err


def test_a_language_models_split_is_scored_as_text(text, tmp_path, writehead):
    go(text, tmp_path / "run", replace(CONFIG, steps=2), LANGUAGE)
    command = ("evaluate", tmp_path / "run", "--dataset", text, "--split", "dev", "--json")
    code, out, _ = writehead(*command)
    split = Dataset.open(text).split("dev")
    assert code == 0
    assert json.loads(out)["lines"] == len(split)
    assert json.loads(out)["ppl_per_word"] > 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "give --source with --reference, or --test-set, or --text, or --dataset; one of"),
        (["--dataset=a", "--text=a"], "one of them"),
        (["--split=dev", "--text=a"], "--split is a dataset's; give the dataset too"),
        (["--dataset=nowhere"], "there is no dataset at nowhere"),
        (["--source=.", "--reference=b"], ". is a folder; give a file of text"),
        (["--source=a"], "give --source with --reference"),
        (["--reference=a"], "give --source with --reference"),
        (["--source=a", "--reference=b", "--text=a"], "one of them"),
        (["--source=a", "--reference=short"], "9 source lines and 8 reference lines do not pair"),
        (["--source=empty", "--reference=empty"], "there is no line to score"),
        (["--source=none", "--reference=b"], "cannot be read"),
        (["--source=latin", "--reference=b"], "is not UTF-8"),
        (["--text=a"], "a translation model is scored on pairs"),
        (["--source=a", "--reference=b", "--search=beam-5"], "did you mean 'beam-4'?"),
        (["--test-set=wmt-14"], "did you mean 'wmt14'?"),
        (["--test-set=wmt14"], "could not be fetched"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(
    run, tmp_path, monkeypatch, writehead, options, words
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SACREBLEU", str(tmp_path / "nothing-fetched"))

    def unreachable(*_, **__):
        raise urllib.error.URLError("no network here")

    monkeypatch.setattr("sacrebleu.get_source_file", unreachable)
    for name, lines in (("a", SOURCES), ("b", REFERENCES), ("short", SOURCES[1:]), ("empty", [])):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
    (tmp_path / "latin").write_bytes("Käse\n".encode("latin-1"))
    code, _, err = writehead("evaluate", run, *options, "--device=cpu")
    assert code == 2
    assert words in err.replace("\n", " ")
    assert "Traceback" not in err


def test_a_named_test_set_is_read_line_by_line(tmp_path, monkeypatch):
    for name, text in (("en", "a\u2028b\nc\n"), ("de", "d\ne\n")):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr("sacrebleu.get_source_file", lambda *_: str(tmp_path / "en"))
    monkeypatch.setattr("sacrebleu.get_reference_files", lambda *_: [str(tmp_path / "de")])
    assert named_test_set("wmt14") == (["a\u2028b", "c"], ["d", "e"])
    monkeypatch.setattr(
        "sacrebleu.get_source_file",
        lambda *_: (_ for _ in ()).throw(SystemExit(1)),
    )
    with pytest.raises(DataError, match="give its source and reference"):
        named_test_set("wmt13")
