import dataclasses
import json

import numpy as np
import pytest
import torch

from foreign_tokenizers import foreign_engine
from helpers import config, model
from texts import sentences
from writehead.config import DecodeConfig
from writehead.engine import beam_search, greedy
from writehead.errors import ConfigError, RunError
from writehead.interop.ctranslate2 import QUANTIZATIONS, Vocabulary, export_ctranslate2
from writehead.interop.huggingface import import_model
from writehead.runs import load_run, save_run

ctranslate2 = pytest.importorskip("ctranslate2")
pytest.importorskip("transformers")
from witnesses import MODELS, saved  # noqa: E402

MARIAN = {"norm": "layer", "norm_place": "post", "positions": "sinusoidal", "bias": True}
MARIAN |= {
    "embedding_scale": 20**0.5,
    "activation": "silu",
    "output_bias": True,
    "logit_scale": 1.0,
}
NLLB = {"norm": "layer", "positions": "sinusoidal", "bias": True, "position_offset": 2}
NLLB |= {"embedding_scale": 20**0.5, "logit_scale": 1.0, "bos": 1}
LLAMA = {"positions": "rotary", "gated": True, "activation": "silu", "tied": False}
GPT_2 = {"norm": "layer", "bias": True, "activation": "gelu_tanh", "logit_scale": 1.0}
GEMMA = {"tied": True, "embedding_scale": 4.5, "activation": "gelu_tanh", "norm_offset": 1.0}
BATCH, LENGTH = 40, 9
LIMITS = {"max_decoding_length": LENGTH, "min_decoding_length": 0, "length_penalty": 0}


def made_and_texts(task="translation", seed=0, **changes):
    """A model in which gains, biases and scales matter, and the texts of its tokens."""
    torch.manual_seed(seed)
    made = model(config(task, **{"d": 20, "h": 6, "k": 8, "v": 8, **changes}), dtype=torch.float32)
    for name, weight in made.named_parameters():
        if "norm" in name and name.endswith("weight"):
            torch.nn.init.normal_(weight, mean=1.0, std=0.5)
        elif "tokens" in name:  # as in models with scaled embeddings
            weight.data /= made.config.embedding_scale or 1.0
    return made, [f"token{i}" for i in range(made.config.vocab_size)]


def random_sources(size, eos):
    """Random sources of several lengths, with eos, padded [b, m], and their lengths."""
    lengths = torch.randint(2, 12, (BATCH,))
    sources = torch.randint(3, size, (BATCH, 12))
    sources[torch.arange(BATCH), lengths - 1] = eos
    return sources, lengths


def ours_and_theirs(made, translator, tokens, source_tokens):
    """Log-probabilities of the tokens and eos of random targets: ours and CTranslate2's."""
    cfg = made.config
    sources = torch.randint(3, len(source_tokens), (BATCH, 7))
    targets = torch.randint(3, len(tokens), (BATCH, LENGTH))
    bos, eos = (torch.full((BATCH, 1), special) for special in (cfg.bos, cfg.eos))
    with torch.no_grad():
        logits = made(torch.cat([sources, eos], 1), torch.cat([bos, targets], 1))
    labels = torch.cat([targets, eos], 1).unsqueeze(2)
    given = [[source_tokens[i] for i in row] for row in sources]
    results = translator.score_batch(given, [[tokens[i] for i in row] for row in targets])
    theirs = torch.tensor([result.log_probs for result in results])
    return logits.log_softmax(-1).gather(2, labels).squeeze(2), theirs


@pytest.mark.parametrize(
    "changes",
    [
        {"g": 6},
        {"g": 2, "norm": "layer", "activation": "gelu", "tied": False},
        {"g": 1, "bias": True, "norm": "layer", "activation": "gelu_tanh", "logit_scale": 0.3},
        {"g": 1, "bos": 4, "eos": 7, "norm_epsilon": 0.3},
        {"g": 2, "encoder_g": 6, "activation": "silu", "embedding_scale": 1.7, "output_bias": True},
        {"g": 1, "encoder_g": 3, "positions": "sinusoidal", "position_offset": 2, "tied": False},
        {"g": 6, "encoder_g": 1, "position_offset": 2, "embedding_scale": 0.5},
        {"g": 3, "cross_g": 2, "encoder_g": 1},
        {"g": 6, "cross_g": 1, "k": 5, "v": 9, "bias": True},
        {"g": 1, "cross_g": 6, "k": 10, "v": 3},
        {"g": 2, "gated": True, "activation": "gelu", "bias": True, "source_vocab_size": 29},
        {"g": 1, "positions": "rotary", "k": 6, "v": 7},
        {"g": 1, "positions": "rotary", "rotary_factor": 3.0, "rotary_original": 5},
        {"g": 6, "positions": "rotary", "rotary_factor": 2.5, "norm_offset": 1.0},
        {"g": 2, "window": 3, "cross_g": 1},
        {"g": 1, "norm_place": "post", "logit_scale": 0.7},
        {"g": 6, **MARIAN},
        {"g": 1, **MARIAN, "source_vocab_size": 31, "tied": False},
        {"g": 6, **NLLB},
        {"g": 2, **NLLB},
    ],
    ids=lambda changes: ",".join(f"{name}={value}" for name, value in changes.items())[:60],
)
def test_a_translation_model_gives_our_tokens_and_scores(tmp_path, changes):
    made, tokens = made_and_texts(**changes)
    cfg, size = made.config, made.config.source_vocab_size or made.config.vocab_size
    source_tokens = [f"{'token' if size == len(tokens) else 'source'}{i}" for i in range(size)]
    source_tokens[cfg.eos], source_tokens[2] = tokens[cfg.eos], tokens[2]
    export_ctranslate2(made, Vocabulary(tokens, source_tokens), tmp_path / "model")
    translator = ctranslate2.Translator(str(tmp_path / "model"), "cpu", compute_type="float32")
    sources, lengths = random_sources(size, cfg.eos)
    given = [
        [source_tokens[i] for i in source[: n - 1]]
        for source, n in zip(sources, lengths, strict=True)
    ]
    if cfg.window is None:  # score_batch ignores it
        ours, theirs = ours_and_theirs(made, translator, tokens, source_tokens)
        torch.testing.assert_close(theirs, ours, atol=1e-4, rtol=1e-4)
    for beam in (1, 3):
        state = made.start(sources, LENGTH, source_lengths=lengths, beam=beam)
        options = DecodeConfig(beam=beam, max_length=LENGTH, alpha=0.0)
        expected = beam_search(made.step, state, options, eos=cfg.eos)
        results = translator.translate_batch(given, beam_size=beam, return_scores=True, **LIMITS)
        for result, [best, *_] in zip(results, expected, strict=True):
            assert result.hypotheses[0] == [tokens[i] for i in best.tokens]
            assert result.scores[0] == pytest.approx(best.log_probability, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {"g": 6, **GPT_2},
        {"g": 1, **GPT_2, "activation": "gelu", "position_offset": 2},  # GPT-BigCode
        {"g": 2, **LLAMA, "rotary_base": 500.0},
        {"g": 6, **LLAMA, **GEMMA},
        {"g": 1, **LLAMA, "k": 4, "v": 7, "window": 23},
        {"g": 3, "norm_place": "post", "positions": "sinusoidal", "output_bias": True},
        {"g": 2, **LLAMA, "rotary_factor": 3.0, "rotary_original": 11, "rotary_high": 2.5},
    ],
    ids=["GPT-2", "GPT-BigCode", "Llama", "Gemma", "multi-query Llama", "post-norm", "Llama 3"],
)
def test_a_language_model_gives_our_tokens_and_log_probabilities(tmp_path, changes):
    made, tokens = made_and_texts("language", **changes)
    export_ctranslate2(made, Vocabulary(tokens), tmp_path / "model")
    generator = ctranslate2.Generator(str(tmp_path / "model"), "cpu", compute_type="float32")
    prompts = torch.randint(3, len(tokens), (BATCH, 5))
    texts = [[tokens[i] for i in prompt] for prompt in prompts]
    found = torch.from_numpy(np.array(generator.forward_batch(texts, return_log_probs=True)))
    with torch.no_grad():
        expected = made(prompts).log_softmax(-1)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    state = made.start(prompts, 5 + LENGTH)
    ours = greedy(made.step, state, DecodeConfig(max_length=LENGTH), eos=made.config.eos)
    results = generator.generate_batch(texts, max_length=LENGTH, include_prompt_in_result=False)
    for result, best in zip(results, ours, strict=True):
        assert result.sequences[0] == [tokens[i] for i in best.tokens]


def scores(translator, sources, targets):
    """CTranslate2's log-probabilities of the tokens of targets, and of eos."""
    results = translator.score_batch(sources, targets)
    return torch.tensor([score for result in results for score in result.log_probs])


@pytest.mark.parametrize("name", sorted({*MODELS} - {"mistral", "t5", "t5-v1.1", "mt5"}))
def test_an_imported_model_gives_the_log_probabilities_of_transformers(tmp_path, name):
    theirs = saved(tmp_path / "theirs", name, dtype=torch.float32)
    import_model(tmp_path / "theirs", tmp_path / "run")
    made = load_run(tmp_path / "run").model
    cfg = made.config
    tokens, source_tokens = (
        [f"token{i}" for i in range(size)]
        for size in (cfg.vocab_size, cfg.source_vocab_size or cfg.vocab_size)
    )
    export_ctranslate2(made, Vocabulary(tokens, source_tokens), tmp_path / "model")
    path, options = str(tmp_path / "model"), {"device": "cpu", "compute_type": "float32"}
    given = torch.randint(3, len(tokens) - 1, (5, LENGTH))
    texts = [[tokens[i] for i in row] for row in given]
    if cfg.task == "language":
        found = ctranslate2.Generator(path, **options).forward_batch(texts, return_log_probs=True)
        with torch.no_grad():
            expected = theirs(given).logits.log_softmax(-1)
        torch.testing.assert_close(torch.from_numpy(np.array(found)), expected, atol=1e-4, rtol=0)
        return
    sources = torch.randint(3, len(source_tokens) - 1, (5, 7))
    results = ctranslate2.Translator(path, **options).score_batch(
        [[source_tokens[i] for i in row] for row in sources], texts
    )
    bos, eos = (torch.full((5, 1), special) for special in (cfg.bos, cfg.eos))
    with torch.no_grad():
        sides = {"decoder_input_ids": torch.cat([bos, given], 1), "use_cache": False}
        logits = theirs(torch.cat([sources, eos], 1), **sides).logits
    expected = logits.log_softmax(-1).gather(2, torch.cat([given, eos], 1).unsqueeze(2)).squeeze(2)
    found = torch.tensor([result.log_probs for result in results])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_quantization_changes_the_scores_by_a_few_per_cent(tmp_path, quantization):
    made, tokens = made_and_texts(g=1, d=64, f=128, logit_scale=0.05)
    export_ctranslate2(made, Vocabulary(tokens), tmp_path / "model", quantization=quantization)
    translator = ctranslate2.Translator(str(tmp_path / "model"), "cpu")
    ours, theirs = ours_and_theirs(made, translator, tokens, tokens)
    error = (theirs - ours).abs().mean() / ours.abs().mean()
    limit = 0.03 if "int" in quantization else 0.01 if "16" in quantization else 1e-5
    assert error < limit
    size = (tmp_path / "model" / "model.bin").stat().st_size
    assert size < (3 if "16" in quantization else 5) * sum(W.numel() for W in made.parameters())


@pytest.mark.parametrize(
    ("task", "changes", "options", "reason"),
    [
        ("language", {"window": 3}, {}, "window=3"),
        ("translation", {}, {"quantization": "int4"}, "int4"),
        ("translation", {"source_vocab_size": 11}, {}, "the source vocabulary"),
        ("translation", {}, {"source": ["a", "b", "c"]}, "token1"),
        ("translation", {"vocab_size": 36}, {}, "36"),
        ("translation", {"vocab_size": 39, "bos": 37}, {}, "37"),
        ("translation", {}, {"files": {"no_such_folder/a": b""}}, "could not be written"),
    ],
)
def test_what_ctranslate2_cannot_express_is_refused(tmp_path, task, changes, options, reason):
    made = model(dataclasses.replace(config(task), **changes))
    source = options.pop("source", None)
    vocabulary = Vocabulary([f"token{i}" for i in range(37)], source)
    with pytest.raises((ConfigError, RunError), match=reason):
        export_ctranslate2(made, vocabulary, tmp_path / "model", **options)
    assert not list(tmp_path.iterdir())


def test_repeated_texts_and_unused_ids_map_one_to_one(tmp_path):
    made, tokens = made_and_texts(output_bias=True)
    tokens = [*tokens[:9], "token5", "token5", *tokens[11:30]]
    with torch.no_grad():
        made.output_bias[10], made.output_bias[11], made.output_bias[30:] = 50.0, 90.0, 99.0
    options = {"files": {"tokenizer.model": b"pieces"}, "add_source_eos": False}
    vocabulary = Vocabulary(tokens, unknown=2, suppressed=[11, 36])
    export_ctranslate2(made, vocabulary, tmp_path / "model", **options)
    files = {path.name: path for path in (tmp_path / "model").iterdir()}
    assert {*files} == {"config.json", "model.bin", "shared_vocabulary.json", "tokenizer.model"}
    assert files["tokenizer.model"].read_text() == "pieces"
    texts = json.loads(files["shared_vocabulary.json"].read_text())
    assert len(set(texts)) == 30
    assert [*texts[:9], *texts[11:]] == [*tokens[:9], *tokens[11:]]
    translator = ctranslate2.Translator(str(tmp_path / "model"), "cpu")
    for beam in (1, 4):
        given = {"beam_size": beam, "max_decoding_length": 4}
        [result] = translator.translate_batch([["token5", "no such token"]], **given)
        assert result.hypotheses[0] == [texts[10]] * 4
    with pytest.raises(RunError, match="exists"):
        export_ctranslate2(made, Vocabulary(tokens), tmp_path / "model")
    export_ctranslate2(made, Vocabulary(tokens), tmp_path / "model", overwrite=True)
    assert {path.name for path in (tmp_path / "model").iterdir()} == {*files} - {"tokenizer.model"}
    config_json = json.loads((tmp_path / "model" / "config.json").read_text())
    assert (config_json["unk_token"], config_json["add_source_eos"]) == ("token1", True)


@pytest.mark.slow
def test_the_bundled_model_translates_the_same_in_ctranslate2(writehead, tmp_path):
    lines = ["How are you today?", "", "He said that he had never seen such a beautiful garden."]
    (tmp_path / "text").write_text("\n".join(lines))
    references = [
        "Wie geht es Ihnen heute?",
        "",
        "Er sagte, einen so schönen Garten gebe es nicht.",
    ]
    (tmp_path / "references").write_text("\n".join(references), encoding="utf-8")
    given = ("--input", tmp_path / "text", "--reference", tmp_path / "references")
    options = (*given, "--device=cpu", "--repeats=1", "--output", tmp_path / "record.json")
    code, out, err = writehead("bench", "translate", *options)
    assert code == 0, err
    assert "bleu" in out
    result = json.loads((tmp_path / "record.json").read_text())
    assert result["run"] == "writehead/bundled/en-de"
    engines = {
        name: one["searches"] for name, one in result["engines"].items() if "searches" in one
    }
    for search in ("greedy", "beam-4"):
        ours, theirs, int8 = (
            engines[name][search] for name in ("ours", "CTranslate2", "CTranslate2, int8")
        )
        assert (theirs["equal_lines"], theirs["bleu"]) == (3, ours["bleu"])
        assert int8["equal_lines"] >= 1
        assert 0 < int8["bleu"]["intl"] <= 100
    (tmp_path / "references").write_text("one")
    code, _, err = writehead("bench", "translate", *options, "--force")
    assert (code, "references" in err) == (2, True)


@pytest.mark.parametrize("name", ["marian-separate", "nllb"])
def test_the_peer_of_a_benchmark_has_the_vocabularies_and_languages_of_ours(
    writehead, tmp_path, name
):
    made, _ = foreign_engine(tmp_path / "files", name, "translation", source_positions=12)
    save_run(tmp_path / "run", made.model.float(), tokenizer=tmp_path / "files")
    lines = [*sentences(4), "", "a cat"]
    lines = [line for line in lines if len(made.tokenizer.encode(line)) < 10]
    (tmp_path / "text").write_text("\n".join(lines))
    languages = ["--source-lang=fra_Latn", "--target-lang=deu_Latn"] if name == "nllb" else []
    given = (tmp_path / "run", "--input", tmp_path / "text", *languages)
    options = ("--device=cpu", "--repeats=1", "--beam=1", "--output", tmp_path / "record.json")
    code, _, err = writehead("bench", "translate", *given, *options)
    assert code == 0, err
    engines = json.loads((tmp_path / "record.json").read_text())["engines"]
    found = {one: engine["searches"]["greedy"]["equal_lines"] for one, engine in engines.items()}
    assert found["CTranslate2"] == found["ours"] == len(lines) >= 3
