"""Evaluates models: ln(PPL) per subword token, perplexity per word, and sacrebleu's BLEU."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from writehead.config import DecodeConfig, ModelConfig, VocabularyConfig
from writehead.data.batches import Units, padded_batches
from writehead.data.dataset import Dataset, Ends, Side, Split, special_ends
from writehead.data.sources import read_lines
from writehead.data.tokenizer import Tokenizer
from writehead.engine import Engine
from writehead.engine.engine import Progress
from writehead.errors import ConfigError, DataError, nearest
from writehead.model import LanguageModel, TranslationModel
from writehead.training.loss import batch_loss
from writehead.util.extras import requires

BATCH_TOKENS = 8192
SEARCHES = {
    "greedy": DecodeConfig(beam=1, alpha=0.0),
    "beam-4": DecodeConfig(beam=4, alpha=0.6),
}


@dataclass(frozen=True)
class Likelihood:
    """The negative log-likelihood of a text, and its number of tokens including `eos`."""

    nll: float
    tokens: int
    skipped: int = 0  # pairs longer than the model's positions

    @property
    def ln_ppl(self) -> float:
        """The logarithm of the perplexity per subword token, as in Table 1."""
        return self.nll / self.tokens


@torch.no_grad()
def likelihood(
    model: nn.Module,
    config: ModelConfig,
    split: Split,
    device: torch.device,
    limit: int | None = None,
) -> Likelihood:
    """Returns the likelihood of a split, or of its first `limit` sequences."""
    was_training, nll, tokens = model.training, 0.0, 0
    model.eval()
    source, target = config.source_positions or None, config.target_positions
    lengths = {"source_length": source, "target_length": target}
    for batch in padded_batches(split, BATCH_TOKENS, **lengths, limit=limit):
        nll += batch_loss(model, batch.to(device), label_smoothing=0.0, z_loss=0.0).nll.item()
        tokens += batch.tokens
    model.train(was_training)
    return Likelihood(nll, tokens, Units(split, source, target).skipped)


def text_likelihood(
    engine: Engine,
    targets: Sequence[str],
    sources: Sequence[str] | None = None,
    *,
    source_lang: str | None = None,
    target_lang: str | None = None,
) -> Likelihood:
    """Returns the likelihood of texts, or of translations given their sources.

    The language token of a target is scored too.
    """
    model, tokenizer = engine.model, engine.tokenizer
    vocabulary = VocabularyConfig.of(model.config, source_lang, target_lang)
    ends = special_ends(model.config.task, tokenizer, vocabulary)
    sides = {"target": _encode(tokenizer.target, targets, ends["target"])}
    if sources is not None:
        if len(sources) != len(targets):
            raise DataError(
                f"{len(sources)} source lines have {len(targets)} references; pass one for each"
            )
        sides["source"] = _encode(tokenizer, sources, ends["source"])
    result = likelihood(model, model.config, Split("given", sides), model.device)
    if not result.tokens:
        raise DataError("there is no line to score that fits in the model; pass other text")
    return result


def evaluate_text(engine: Engine, lines: Sequence[str]) -> dict[str, Any]:
    """Returns the perplexity per word (a line end is a word) and the ln(PPL) per token."""
    if not isinstance(engine.model, LanguageModel):
        raise DataError("a translation model is scored on pairs; pass sources and references")
    lines = [line for line in lines if line.strip()]
    result = text_likelihood(engine, lines)
    words = sum(len(line.split()) + 1 for line in lines)
    return {
        "lines": len(lines),
        "words": words,
        "tokens": result.tokens,
        "ln_ppl": result.ln_ppl,
        # infinite instead of an OverflowError
        "ppl_per_word": torch.tensor(result.nll / words, dtype=torch.float64).exp().item(),
    }


def evaluate_translation(
    engine: Engine,
    sources: Sequence[str],
    references: Sequence[str],
    searches: Iterable[str] | None = None,
    *,
    source_lang: str | None = None,
    target_lang: str | None = None,
    show: Progress | None = None,
) -> dict[str, Any]:
    """Returns the ln(PPL) per subword token of the references, and the BLEU of each search."""
    if not isinstance(engine.model, TranslationModel):
        raise DataError("a language model is scored on text; pass text without sources")
    chosen = check_searches(searches)
    load_sacrebleu()  # raises if it is missing, before minutes of decoding
    result = text_likelihood(
        engine, references, sources, source_lang=source_lang, target_lang=target_lang
    )
    scores = {}
    for name, options in chosen.items():
        outputs = engine.translate(
            sources,
            options,
            source_lang=source_lang,
            target_lang=target_lang,
            progress=show,
        )
        scores[name] = bleu([output.text for output in outputs], references)
    return {
        "sentences": len(sources),
        "tokens": result.tokens,
        "skipped": result.skipped,
        "ln_ppl": result.ln_ppl,
        "bleu": scores,
    }


def check_searches(names: Iterable[str] | None) -> dict[str, DecodeConfig]:
    """Returns the named searches, by default all; raises if one is unknown."""
    chosen = list(SEARCHES if names is None else names)
    for name in chosen:
        if name not in SEARCHES:
            raise ConfigError(f"unknown search {name!r}; {nearest(name, SEARCHES)}")
    return {name: SEARCHES[name] for name in chosen}


def load_sacrebleu(extra: str = "evaluate") -> ModuleType:
    """Imports sacrebleu, or raises an error that names the extra to install."""
    with requires(extra):
        import sacrebleu
    return sacrebleu


def bleu(outputs: Sequence[str], references: Sequence[str]) -> dict[str, Any]:
    """Returns sacrebleu's cased BLEU with the paper's tokenization, intl, and the default, 13a."""
    sacrebleu, scores = load_sacrebleu(), dict[str, Any]()
    for tokenization in ("intl", "13a"):
        metric = sacrebleu.BLEU(tokenize=tokenization)
        score = metric.corpus_score(list(outputs), [list(references)]).score
        scores[tokenization] = min(score, 100.0)  # sums are rounded
        scores[f"{tokenization}_signature"] = str(metric.get_signature())
    return scores


def named_test_set(name: str) -> tuple[list[str], list[str]]:
    """Returns the English and German lines of a sacrebleu test set; downloads it once."""
    sacrebleu = load_sacrebleu()
    tests = sacrebleu.get_available_testsets()
    known = [test for test in tests if "en-de" in sacrebleu.DATASETS[test].langpairs]
    if name not in known:
        raise DataError(f"sacrebleu has no en-de test set {name!r}; {nearest(name, known)}")
    try:
        source = sacrebleu.get_source_file(name, "en-de")
        reference = sacrebleu.get_reference_files(name, "en-de")[0]
    except (OSError, SystemExit) as error:  # sacrebleu exits if a download fails
        raise DataError(f"{name} could not be downloaded ({error}); pass it as files") from error
    return list(read_lines(Path(source))), list(read_lines(Path(reference)))


def split_texts(data: Dataset, name: str) -> tuple[list[str] | None, list[str]]:
    """Returns the decoded sources (None for a language model) and targets of a split."""
    split, tokenizer = data.split(name), data.tokenizer
    decoders = {"source": tokenizer.decode_sources, "target": tokenizer.decode_all}
    texts = {
        side: decoders[side]([tokens[i].tolist() for i in range(len(split))])
        for side, tokens in split.sides.items()
    }
    return texts.get("source"), texts["target"]


def _encode(tokenizer: Tokenizer, lines: Sequence[str], ends: Ends) -> Side:
    """Returns the tokens of lines."""
    ids = tokenizer.encode_all(list(lines))
    offsets = np.cumsum([0, *map(len, ids)]).astype(np.uint64)
    return Side(np.fromiter(chain.from_iterable(ids), dtype=np.uint32), offsets, ends)
