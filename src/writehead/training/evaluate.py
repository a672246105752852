"""Scores models: ln(PPL) per subword token, perplexity per word, and sacrebleu's BLEU."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from writehead.config import DecodeConfig
from writehead.data.batches import Units, padded_batches
from writehead.data.dataset import Dataset, Side, Split
from writehead.data.tokenizer import Tokenizer
from writehead.decoding import Engine
from writehead.decoding.textio import read_lines
from writehead.decoding.worker import Progress
from writehead.errors import ConfigError, DataError, nearest
from writehead.model import LanguageModel, TranslationModel
from writehead.training.loss import batch_loss
from writehead.util.extras import requires

TOKENS = 8192  # positions of a batch whose loss is taken
SEARCHES = {
    "greedy": DecodeConfig(beam=1, alpha=0.0),
    "beam-4": DecodeConfig(beam=4, alpha=0.6),  # §4.2
}


@dataclass(frozen=True)
class Likelihood:
    """The negative log-likelihood of a text: its sum, and the tokens it is over, ends included."""

    nll: float
    tokens: int
    skipped: int = 0  # pairs longer than the model's positions

    @property
    def ln_ppl(self) -> float:
        """ln of the perplexity a subword token, as in Table 1."""
        return self.nll / self.tokens


@torch.no_grad()
def likelihood(
    model: nn.Module,
    split: Split,
    device: torch.device,
    *,
    source_length: int | None,
    target_length: int,
    limit: int | None = None,
) -> Likelihood:
    """The likelihood that a model gives to a split, or to its first `limit` sequences."""
    was_training = model.training
    model.eval()
    nll, tokens = 0.0, 0
    lengths = {"source_length": source_length, "target_length": target_length}
    for batch in padded_batches(split, TOKENS, **lengths, limit=limit):
        loss = batch_loss(model, batch.to(device), label_smoothing=0.0, z_loss=0.0)
        nll, tokens = nll + loss.nll.item(), tokens + batch.tokens
    model.train(was_training)
    skipped = Units(split, source_length, target_length).skipped
    return Likelihood(nll, tokens, skipped)


def text_likelihood(
    engine: Engine, targets: Sequence[str], sources: Sequence[str] | None = None
) -> Likelihood:
    """The likelihood of texts, or of translations given their sources."""
    sides = {"target": _side(engine.tokenizer, targets)}
    if sources is not None:
        if len(sources) != len(targets):
            raise DataError(
                f"{len(sources)} source lines and {len(targets)} reference lines do not pair; "
                f"give files of one length"
            )
        sides["source"] = _side(engine.tokenizer, sources)
    if not targets:
        raise DataError("there is no line to score; give a file with text")
    config = engine.model.config
    found = likelihood(
        engine.model,
        Split("given", sides),
        engine.model.device,
        source_length=config.source_positions or None,
        target_length=config.target_positions,
    )
    if not found.tokens:
        raise DataError(
            f"every pair is longer than the model's {config.target_positions} positions; give "
            f"shorter lines"
        )
    return found


def evaluate_text(engine: Engine, lines: Sequence[str]) -> dict[str, Any]:
    """A language model's perplexity a word, as in Table 3, and ln(PPL) a subword token.

    A word is what stands between spaces, and the end of a line counts as one. The perplexity of
    words that are very long is infinite.
    """
    if not isinstance(engine.model, LanguageModel):
        raise DataError("a translation model is scored on pairs; give a source and a reference")
    lines = [line for line in lines if line.strip()]
    found = text_likelihood(engine, lines)
    words = sum(len(line.split()) + 1 for line in lines)
    return {
        "lines": len(lines),
        "words": words,
        "tokens": found.tokens,
        "ln_ppl": found.ln_ppl,
        "ppl_per_word": _exp(found.nll / words),
    }


def evaluate_translation(
    engine: Engine,
    sources: Sequence[str],
    references: Sequence[str],
    searches: Iterable[str] | None = None,
    *,
    show: Progress | None = None,
) -> dict[str, Any]:
    """Returns ln(PPL) per subword token of the references, and BLEU of each search.

    BLEU is sacrebleu's, of cased and detokenized text: with `-tok intl` as in the paper, and with
    its default.
    """
    if not isinstance(engine.model, TranslationModel):
        raise DataError("a language model is scored on text; pass text without sources")
    chosen = list(SEARCHES if searches is None else searches)
    for name in chosen:
        if name not in SEARCHES:
            raise ConfigError(f"unknown search {name!r}; {nearest(name, SEARCHES)}")
    for side, lines in (("source", sources), ("reference", references)):
        if lines and not any(line.strip() for line in lines):
            raise DataError(f"every {side} line is empty; pass files with text")
    load_sacrebleu()  # raises if it is missing, before minutes of decoding
    found = text_likelihood(engine, references, sources)
    answer: dict[str, Any] = {
        "sentences": len(sources),
        "tokens": found.tokens,
        "skipped": found.skipped,
        "ln_ppl": found.ln_ppl,
        "bleu": {},
    }
    for name in chosen:
        outputs = engine.translate(sources, SEARCHES[name], progress=show)
        answer["bleu"][name] = bleu([output.text for output in outputs], references)
    return answer


def load_sacrebleu(extra: str = "evaluate") -> ModuleType:
    """Imports sacrebleu; if it is missing, raises an error that names the extra to install."""
    with requires(extra):
        import sacrebleu
    return sacrebleu


def bleu(outputs: Sequence[str], references: Sequence[str]) -> dict[str, Any]:
    """sacrebleu's score with the paper's tokenization and with the default one."""
    sacrebleu, scores = load_sacrebleu(), dict[str, Any]()
    for tokenization in ("intl", "13a"):
        metric = sacrebleu.BLEU(tokenize=tokenization)
        scores[tokenization] = metric.corpus_score(list(outputs), [list(references)]).score
        scores[f"{tokenization}_signature"] = str(metric.get_signature())
    return scores


def named_test_set(name: str) -> tuple[list[str], list[str]]:
    """The English and German of a test set that sacrebleu knows, fetched the first time."""
    sacrebleu = load_sacrebleu()
    tests = sacrebleu.get_available_testsets()
    known = [test for test in tests if "en-de" in sacrebleu.DATASETS[test].langpairs]
    if name not in known:
        raise DataError(f"sacrebleu has no en-de test set {name!r}; {nearest(name, known)}")
    try:
        source = sacrebleu.get_source_file(name, "en-de")
        reference = sacrebleu.get_reference_files(name, "en-de")[0]
    except (OSError, SystemExit) as error:  # sacrebleu exits where it cannot fetch
        raise DataError(
            f"the test set {name} could not be fetched ({error}); without a network, pass its "
            f"source and reference as files"
        ) from error
    return list(read_lines(source)), list(read_lines(reference))


def split_texts(directory: Path, name: str) -> tuple[list[str] | None, list[str]]:
    """Sources, if there are any, and targets of a dataset's split, as text made of its tokens."""
    data = Dataset.open(directory)
    split, decode = data.split(name), data.tokenizer.decode
    targets = [decode(split.target[i]) for i in range(len(split))]
    if data.task == "language":
        return None, targets
    return [decode(split.source[i]) for i in range(len(split))], targets


def _exp(value: float) -> float:
    """e to the power of `value`; infinity where no float is so large."""
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def _side(tokenizer: Tokenizer, lines: Sequence[str]) -> Side:
    ids = tokenizer.encode_all(list(lines))
    offsets = np.cumsum([0, *map(len, ids)]).astype(np.uint64)
    return Side(np.fromiter(chain.from_iterable(ids), dtype=np.uint32), offsets)
