"""The engine with tokenizers of other families, against transformers' tokenizers and a search."""

import dataclasses
import json

import pytest
import torch

import foreign_tokenizers
from foreign_tokenizers import foreign_engine
from texts import sentences
from writehead.config import DecodeConfig
from writehead.data.tokenizer import load_tokenizer
from writehead.engine import Engine, beam_search
from writehead.errors import ConfigError, DataError
from writehead.interop.quantize import quantize_run
from writehead.runs import load_run, save_run
from writehead.training.evaluate import text_likelihood

LINES = [*sentences(5), "日本 🙂", "a </s> b", *sentences(3, seed=1)]
OPTIONS = [DecodeConfig(max_length=9, beam=1), DecodeConfig(max_length=9, beam=3, n_best=3)]
LANGUAGES = {"m2m": ("fr", "de"), "nllb": ("fra_Latn", "deu_Latn"), "marian": (None, "deu")}
TRANSLATORS = ["marian", "marian-separate", "m2m", "nllb", "nllb-legacy", "t5"]


def without(tokens):
    """A processor that forbids tokens, before probabilities are computed."""
    return lambda chosen, logits: logits.index_fill(1, torch.tensor(tokens, dtype=int), -torch.inf)


@pytest.mark.parametrize("options", OPTIONS, ids=["greedy", "beam"])
@pytest.mark.parametrize("name", TRANSLATORS)
def test_translations_equal_a_search_over_what_transformers_encodes(tmp_path, name, options):
    made, theirs = foreign_engine(tmp_path / name, name, "translation")
    source, target = LANGUAGES.get(name.removesuffix("-legacy"), (None, None))
    lines, forced = LINES, []
    if name == "marian":
        lines = [f">>{target}<<{line}" for line in LINES]
    elif target:
        theirs.src_lang, theirs.tgt_lang = source, target
        forced = [made.tokenizer.target_languages[target]]
        code = f"__{target}__" if name == "m2m" else target
        assert theirs.convert_ids_to_tokens(forced) == [code]
    prefixes = ["", "the cat"] * (len(LINES) // 2)
    languages = {"source_lang": source, "target_lang": target}
    got = list(made.translate(LINES, options, prefixes=prefixes, **languages))
    size = made.tokenizer.target.vocab_size
    processors = [without([*range(size, size + 3), *made.tokenizer.suppressed])]
    longer = dataclasses.replace(options, max_length=9 + len(forced))
    for line, prefix, output in zip(lines, prefixes, got, strict=True):
        ids, start = theirs(line).input_ids, []
        if prefix:
            start = theirs(text_target=prefix, add_special_tokens=False).input_ids
        state = made.model.start(torch.tensor([ids]), 12, beam=options.beam)
        [expected] = beam_search(
            *(made.model.step, state, longer),
            eos=theirs.eos_token_id,
            prefixes=[[*forced, *start]],
            processors=processors,
        )
        texts = [theirs.decode(one.tokens, skip_special_tokens=True) for one in expected]
        if name == "marian":  # transformers decodes language codes
            texts = [text.replace(">>deu<<", "").replace(">>cmn_Hans<<", "") for text in texts]
            assert [one.text.split() for one in output.hypotheses] == [*map(str.split, texts)]
        else:
            assert [one.text for one in output.hypotheses] == texts
        for one, other in zip(output.hypotheses, expected, strict=True):
            assert one.score == pytest.approx(other.score, rel=1e-4)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma"])
def test_prompts_start_as_in_transformers(tmp_path, name):
    made, theirs = foreign_engine(tmp_path / name, name, "language")
    options, lines = OPTIONS[0], ["", *LINES]
    got = list(made.generate(lines, options))
    for line, output in zip(lines, got, strict=True):
        ids = theirs(line).input_ids or [theirs.bos_token_id]
        state = made.model.start(torch.tensor([ids]), len(ids) + 9)
        size = made.tokenizer.vocab_size
        [[expected]] = beam_search(
            *(made.model.step, state, options),
            eos=theirs.eos_token_id,
            processors=[without([*range(size, size + 3)])],
        )
        before = theirs.decode(ids, skip_special_tokens=True)
        whole = theirs.decode([*ids, *expected.tokens], skip_special_tokens=True)
        assert output.text == whole[len(before) :]
        assert "".join(made.stream(line, options)) == output.text


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_prompt_can_fill_all_positions_but_one(tmp_path, name):
    made, _ = foreign_engine(tmp_path / name, name, "language", target_positions=12)
    room = 12 - len(made.tokenizer.prompt_start)
    prompt = made.tokenizer.decode(made.tokenizer.encode("the cat " * 20)[:room])
    assert len(made.tokenizer.encode(prompt)) == room
    [_] = made.generate([prompt])
    with pytest.raises(DataError, match=f"positions for {room}; shorten it"):
        list(made.generate([prompt + " the"]))


@pytest.mark.parametrize("name", TRANSLATORS)
def test_long_lines_are_split_and_each_piece_has_its_languages(tmp_path, name):
    made, _ = foreign_engine(tmp_path / name, name, "translation", source_positions=20)
    source, target = LANGUAGES.get(name.removesuffix("-legacy"), (None, None))
    languages = {"source_lang": source, "target_lang": target}
    line = "The cat sees a bird. A dog runs. The tree is big! " * 3
    frame, asked = made.tokenizer.frame(**languages), []
    submit = made.scheduler.submit
    made.scheduler.submit = lambda requests: submit(asked.extend(requests) or requests)
    [output] = made.translate([line], OPTIONS[1], prefixes=["the"], **languages)
    assert output.pieces == len(asked) > 2
    start = made.tokenizer.target.encode("the")
    for request in asked:
        ids = [*request.tokens]
        assert len(ids) <= 20
        assert ids[: len(frame.before)] == [*frame.before]
        assert ids[len(ids) - len(frame.after) :] == [*frame.after]
    prefixes = sorted((request.prefix for request in asked), key=len)
    assert prefixes[-1] == (*frame.forced, *start)
    assert {*prefixes[:-1]} == {frame.forced}


@pytest.mark.parametrize("beam", [1, 3])
def test_each_of_several_end_tokens_ends_a_text(tmp_path, beam):
    """The text ends with the probability that any of them has."""
    made, _ = foreign_engine(tmp_path / "gpt2", "gpt2", "language", logit_scale=0.5)
    config, ends = made.model.config, [made.model.config.eos, 5, 9]
    (tmp_path / "gpt2" / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    several = Engine(made.model, load_tokenizer(tmp_path / "gpt2"))
    options = DecodeConfig(max_length=9, beam=beam, alpha=0.0)

    def joined(chosen, logits):
        logits = logits.clone()
        logits[:, config.eos] = logits[:, ends].logsumexp(1)
        logits[:, ends[1:]] = -torch.inf
        return logits

    size, finished = made.tokenizer.vocab_size, 0
    for line, output in zip(LINES, several.generate(LINES, options), strict=True):
        ids = [*several.tokenizer.prompt_start, *several.tokenizer.encode(line)]
        state = made.model.start(torch.tensor([ids]), len(ids) + 9, beam=beam)
        [[expected, *_]] = beam_search(
            *(made.model.step, state, options),
            eos=config.eos,
            processors=[joined, without([*range(size, size + 3)])],
        )
        [found, *_] = output.hypotheses
        assert found.score == pytest.approx(expected.score, rel=1e-4)
        assert found.finished == expected.finished
        finished += found.finished
    assert finished


def test_limits_do_not_count_the_forced_language(tmp_path):
    made, _ = foreign_engine(tmp_path / "nllb", "nllb", "translation")
    asked, submit = [], made.scheduler.submit
    made.scheduler.submit = lambda requests: submit(asked.extend(requests) or requests)
    languages = {"source_lang": "fra_Latn", "target_lang": "deu_Latn"}
    list(made.translate(["the cat"], DecodeConfig(max_length=7, min_length=5, beam=1), **languages))
    assert (asked[0].max_length, asked[0].config.min_length) == (8, 6)
    with pytest.raises(DataError, match=r"more than max_length=1;"):
        options = DecodeConfig(max_length=1, beam=1)
        list(made.translate(["a"], options, prefixes=["the cat 5"], **languages))
    with pytest.raises(ConfigError, match="set target_lang"):
        made.translate(["a"])


def test_a_run_keeps_the_files_of_its_tokenizer(tmp_path):
    made, _ = foreign_engine(tmp_path / "files", "marian", "translation")
    expected = list(made.translate(LINES, OPTIONS[1], target_lang="deu"))
    for name, tokenizer in (("a", tmp_path / "files"), ("b", made.tokenizer)):
        save_run(tmp_path / name, made.model, tokenizer=tokenizer)
        engine = Engine.load(tmp_path / name, "cpu", "float64")
        assert list(engine.translate(LINES, OPTIONS[1], target_lang="deu")) == expected
        assert engine.tokenizer.fingerprint == made.tokenizer.fingerprint
    quantize_run(tmp_path / "a", tmp_path / "c")
    assert load_tokenizer(load_run(tmp_path / "c").tokenizer).pieces == made.tokenizer.pieces
    (tmp_path / "c/vocab.json").write_text("{}")
    with pytest.raises(Exception, match=r"vocab\.json does not match"):
        load_run(tmp_path / "c")
    with pytest.raises(DataError, match="does not fit the model"):
        Engine(made.model, load_tokenizer(_gpt2(tmp_path / "gpt2")))


def _gpt2(folder):
    folder.mkdir()
    foreign_tokenizers.gpt2(folder)
    return folder


def test_the_likelihood_of_translations_counts_from_their_language(tmp_path):
    made, theirs = foreign_engine(tmp_path / "m2m", "m2m", "translation")
    lines, targets = sentences(6), sentences(6, seed=1)
    got = text_likelihood(made, targets, lines, source_lang="fr", target_lang="de")
    theirs.src_lang, theirs.tgt_lang, nll, count = "fr", "de", 0.0, 0
    for line, text in zip(lines, targets, strict=True):
        labels = theirs(text_target=text).input_ids
        inputs = [made.model.config.bos, *labels[:-1]]
        logits = made.model(torch.tensor([theirs(line).input_ids]), torch.tensor([inputs]))
        chosen = logits[0].log_softmax(1).gather(1, torch.tensor(labels).unsqueeze(1))
        nll, count = nll - float(chosen.sum()), count + len(labels)
    assert got.tokens == count
    assert got.nll == pytest.approx(nll, rel=1e-5)
