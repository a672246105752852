"""§4.2: what a trained row scores: ln(PPL) a token and BLEU, or perplexity a word.

Likelihoods are taken in float32, so that rows differ by their training and not by rounding;
decoding is done in the engine's own type.
"""

from pathlib import Path
from typing import Any

from writehead.decoding import Engine
from writehead.model import LanguageModel
from writehead.paper.texts import Lines, Text
from writehead.training.evaluate import SEARCHES, bleu, evaluate_text, text_likelihood

# §4.2: the dev set by greedy search, the test set by both
SEARCHED = {"dev": ("greedy",), "test": ("greedy", "beam-4")}


def score(run: Path, text: Text, device: str) -> dict[str, Any]:
    """The scores of a run on each text that its experiment scores."""
    exact = Engine.load(run, device, "float32")
    if isinstance(exact.model, LanguageModel):
        return {name: _score_text(exact, read()) for name, read in text.scored.items()}
    quick = Engine.load(run, device)
    return {
        name: _score_pairs(exact, quick, read(), SEARCHED[name])
        for name, read in text.scored.items()
    }


def _score_text(engine: Engine, lines: Lines) -> dict[str, Any]:
    return {"name": lines.name, **evaluate_text(engine, lines.targets)}


def _score_pairs(
    exact: Engine, quick: Engine, lines: Lines, searches: tuple[str, ...]
) -> dict[str, Any]:
    assert lines.sources is not None, "translations are scored on pairs"
    found = text_likelihood(exact, lines.targets, lines.sources)
    outputs = {
        search: [output.text for output in quick.translate(lines.sources, SEARCHES[search])]
        for search in searches
    }
    return {
        "name": lines.name,
        "sentences": len(lines.targets),
        "tokens": found.tokens,
        "skipped": found.skipped,
        "ln_ppl": found.ln_ppl,
        "dtype": str(quick.model.dtype).removeprefix("torch."),
        "bleu": {search: bleu(text, lines.targets) for search, text in outputs.items()},
    }
