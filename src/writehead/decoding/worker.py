"""From jobs to hypotheses: rows of tokens decoded in batches that fit the device; knows no text."""

import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from writehead.config import DecodeConfig
from writehead.data.tokenizer import EOS
from writehead.decoding.batching import (
    Batching,
    Job,
    batch_cost,
    longest_first,
    take_batch,
    windows,
)
from writehead.decoding.beam import beam_search
from writehead.decoding.search import Hypothesis, sample
from writehead.errors import OutOfRoom, SearchError
from writehead.model import DecoderState, LanguageModel, TranslationModel

if TYPE_CHECKING:
    from writehead.decoding.graphs import GraphDecoder

log = logging.getLogger(__name__)

Progress = Callable[[float], None]  # told how many more lines have finished, in parts if long


class Worker:
    """Decodes jobs by a model, of whose tokens the first `vocab_size` may be chosen."""

    def __init__(
        self,
        model: TranslationModel | LanguageModel,
        vocab_size: int,
        batching: Batching,
        *,
        graphs: bool = True,
    ) -> None:
        self.model = model
        self.vocab_size = vocab_size
        self.batching = batching
        self._graphs = _make_graphs(model, vocab_size) if graphs else None
        self.batch_tokens = batching.budget(model.device.type)  # less once memory ran out

    def work(
        self, lines: Iterable[list[Job]], options: DecodeConfig, progress: Progress | None
    ) -> Iterator[tuple[list[Job], list[list[Hypothesis]]]]:
        """Each line's jobs and the hypotheses of each of them, in order."""
        tell = progress or (lambda count: None)
        for window in windows(lines, self.batching.lines):
            tell(sum(not line for line in window))
            found = iter(self._decode([job for line in window for job in line], options, tell))
            for line in window:
                yield line, [next(found) for _ in line]

    def _decode(
        self, jobs: list[Job], options: DecodeConfig, tell: Progress
    ) -> list[list[Hypothesis]]:
        """The hypotheses of each job, whatever the batches they were decoded in."""
        found: list[list[Hypothesis]] = [[] for _ in jobs]
        order = longest_first(jobs)
        while order:
            ordered = [jobs[i] for i in order]
            count = take_batch(ordered, lambda some: self._fits(some, options.width))
            batch = ordered[:count]
            results = self._search(batch, options)
            if results is None:
                self._make_smaller(batch, options.width)
                continue
            for i, hypotheses in zip(order[:count], results, strict=True):
                found[i] = hypotheses
            tell(sum(job.share for job in batch))
            order = order[count:]
        return found

    def _search(self, batch: list[Job], options: DecodeConfig) -> Sequence[list[Hypothesis]] | None:
        """The hypotheses of each job of one batch; None where the device's memory ran out."""
        limits = [job.max_length for job in batch]
        prefixes = [job.prefix for job in batch]
        config = dataclasses.replace(options, max_length=max(limits))
        try:
            graphs = self._graphs_for(options)
            if graphs is not None:
                return graphs.search(
                    self._tokens(batch),
                    [len(job.tokens) for job in batch],
                    self._capacity(batch),
                    config,
                    eos=EOS,
                    prefixes=prefixes,
                    max_lengths=limits,
                )
            state = self.start(batch, options.width)
            if options.temperature is None:
                return beam_search(
                    self.step, state, config, eos=EOS, prefixes=prefixes, max_lengths=limits
                )
            drawn = sample(
                self.step,
                state,
                config,
                eos=EOS,
                prefixes=prefixes,
                max_lengths=limits,
                seeds=[job.seed for job in batch],
            )
            return [[hypothesis] for hypothesis in drawn]
        except OutOfRoom as error:
            log.warning("%s", error)
            return None
        except torch.OutOfMemoryError:
            return None

    def _graphs_for(self, options: DecodeConfig) -> "GraphDecoder | None":
        """Captured decoding, where a search can be done by it."""
        graphs = self._graphs
        if graphs is None or options.temperature is not None:
            return None
        if options.width > graphs.largest_beam:
            log.warning(
                "beam=%d goes step by step, which is slower: the decoding kernels have room for %d",
                options.width,
                graphs.largest_beam,
            )
            return None
        return graphs

    def _fits(self, jobs: Sequence[Job], beam: int) -> bool:
        """Whether jobs can be one batch: within the budget, and no row stepped past its end."""
        positions = self.model.config.target_positions
        return batch_cost(jobs, beam) <= self.batch_tokens and self._capacity(jobs) <= positions

    def _capacity(self, jobs: Sequence[Job]) -> int:
        """Positions that every row of a batch gets."""
        longest = max(job.max_length for job in jobs)
        if isinstance(self.model, TranslationModel):
            return longest
        return max(len(job.tokens) for job in jobs) + longest - 1

    def _make_smaller(self, batch: list[Job], beam: int) -> None:
        """Halves the budget after a batch that did not fit the memory, and says so once."""
        if len(batch) == 1:
            raise SearchError(
                f"the device's memory does not hold one line of {len(batch[0].tokens)} tokens "
                f"with beam={beam}; use a smaller beam or max_length, or another device"
            )
        cost = batch_cost(batch, beam)
        if self.batch_tokens == self.batching.budget(self.model.device.type):
            log.warning(
                "the device's memory does not hold a batch of %d tokens; going on with smaller "
                "ones, so ask for fewer tokens a batch",
                cost,
            )
        self.batch_tokens = cost // 2
        torch.cuda.empty_cache()

    def start(self, batch: Sequence[Job], beam: int) -> DecoderState:
        """The state that a batch is decoded from."""
        tokens, capacity = self._tokens(batch), self._capacity(batch)
        lengths = torch.tensor([len(job.tokens) for job in batch], device=tokens.device)
        if isinstance(self.model, TranslationModel):
            return self.model.start(tokens, capacity, source_lengths=lengths, beam=beam)
        return self.model.start(tokens, capacity, prompt_lengths=lengths, beam=beam)

    def _tokens(self, batch: Sequence[Job]) -> Tensor:
        """What a batch starts from, [rows, longest], padded on the right."""
        width, pad = max(len(job.tokens) for job in batch), self.model.config.pad
        rows = [job.tokens + [pad] * (width - len(job.tokens)) for job in batch]
        return torch.tensor(rows, device=self.model.device)

    def step(self, tokens: Tensor, state: DecoderState) -> Tensor:
        """The model's step, without logits for ids that the tokenizer has no text for."""
        return self.model.step(tokens, state)[:, : self.vocab_size]


def _make_graphs(model: TranslationModel | LanguageModel, vocab_size: int) -> "GraphDecoder | None":
    """Captured decoding by a model on a GPU; None where it must be decoded step by step."""
    if model.device.type != "cuda":
        return None
    if find_spec("triton") is None:
        log.warning("decoding goes step by step, which is slower: Triton is not installed")
        return None
    from writehead.decoding.graphs import GraphDecoder  # needs Triton, which is optional
    from writehead.model.fused import why_not

    reason = why_not(model)
    if reason is not None:
        log.warning("decoding goes step by step, which is slower: %s", reason)
        return None
    return GraphDecoder(model, vocab_size)
