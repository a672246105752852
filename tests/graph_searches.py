"""Searches by captured graphs, and the same step by step in PyTorch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from search_toys import assert_ranked
from writehead.config import DecodeConfig
from writehead.decoding import Hypothesis, beam_search
from writehead.model import LanguageModel, TranslationModel

EOS = 1
Model = TranslationModel | LanguageModel
Batch = tuple[Tensor, list[int]]  # padded sources or prompts, and their lengths


def capacity(made: Model, batch: Batch, options: DecodeConfig) -> int:
    """The positions that the cache of a row needs."""
    if isinstance(made, TranslationModel):
        return options.max_length
    return max(batch[1]) + options.max_length - 1


def plain(
    made: Model, batch: Batch, options: DecodeConfig, *, eos=EOS, vocab_size=None, **limits
) -> list[list[Hypothesis]]:
    """The hypotheses of the search in PyTorch."""
    name = "source_lengths" if isinstance(made, TranslationModel) else "prompt_lengths"
    lengths = {name: torch.tensor(batch[1], device=made.device)}
    state = made.start(batch[0], capacity(made, batch, options), beam=options.width, **lengths)

    def step(fed: Tensor, state) -> Tensor:
        return made.step(fed, state)[:, :vocab_size]

    return beam_search(step, state, options, eos=eos, **limits)


def captured(decoder, batch: Batch, options: DecodeConfig, **limits) -> Sequence[list[Hypothesis]]:
    """The hypotheses of the captured search."""
    size = capacity(decoder.model, batch, options)
    return decoder.search(*batch, size, options, **({"eos": EOS} | limits))


def assert_same(
    ours: Sequence[list[Hypothesis]], expected: list[list[Hypothesis]], tolerance: float = 1e-4
) -> None:
    for one, other in zip(ours, expected, strict=True):
        assert_ranked(one, other, tolerance)
