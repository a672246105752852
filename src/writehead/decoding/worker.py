"""Decodes jobs, which are rows of tokens, in batches that fit in the device's memory."""

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

Progress = Callable[[float], None]  # adds finished lines; pieces of long lines are fractions


class Worker:
    """Decodes jobs with a model; only the first `vocab_size` tokens can be generated."""

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
        self.batch_tokens = batching.budget(model.device.type)  # halved when memory runs out

    def work(
        self, lines: Iterable[list[Job]], options: DecodeConfig, progress: Progress | None
    ) -> Iterator[tuple[list[Job], list[list[Hypothesis]]]]:
        """Yields each line's jobs with the hypotheses of each job, in the order of the lines."""
        report = progress or (lambda count: None)
        for window in windows(lines, self.batching.lines):
            report(sum(not line for line in window))  # empty lines have no jobs
            results = iter(self._decode([job for line in window for job in line], options, report))
            for line in window:
                yield line, [next(results) for _ in line]

    def _decode(
        self, jobs: list[Job], options: DecodeConfig, report: Progress
    ) -> list[list[Hypothesis]]:
        """Returns the hypotheses of each job, in the order of `jobs`; decodes the longest first."""
        results: list[list[Hypothesis]] = [[] for _ in jobs]
        order = longest_first(jobs)
        while order:
            ordered = [jobs[i] for i in order]
            count = take_batch(ordered, lambda first: self._fits(first, options.width))
            batch = ordered[:count]
            found = self._search(batch, options)
            if found is None:
                self._halve_budget(batch, options.width)
                continue
            for i, hypotheses in zip(order[:count], found, strict=True):
                results[i] = hypotheses
            report(sum(job.share for job in batch))
            order = order[count:]
        return results

    def _search(self, batch: list[Job], options: DecodeConfig) -> Sequence[list[Hypothesis]] | None:
        """Returns the hypotheses of each job in a batch; None if the device ran out of memory."""
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
        """Returns the graph decoder, or None if it does not support these options."""
        graphs = self._graphs
        if graphs is None or options.temperature is not None:
            return None
        if options.width > graphs.largest_beam:
            log.warning(
                "beam=%d is decoded without CUDA graphs, which is slower; their limit is beam=%d",
                options.width,
                graphs.largest_beam,
            )
            return None
        return graphs

    def _fits(self, jobs: Sequence[Job], beam: int) -> bool:
        """Whether jobs fit in one batch: in its token budget, and in the model's positions."""
        positions = self.model.config.target_positions
        return batch_cost(jobs, beam) <= self.batch_tokens and self._capacity(jobs) <= positions

    def _capacity(self, jobs: Sequence[Job]) -> int:
        """Returns the number of positions that each row of a batch needs in the KV cache."""
        longest = max(job.max_length for job in jobs)
        if isinstance(self.model, TranslationModel):
            return longest
        return max(len(job.tokens) for job in jobs) + longest - 1

    def _halve_budget(self, batch: list[Job], beam: int) -> None:
        """Halves the token budget after a batch ran out of memory; warns the first time."""
        if len(batch) == 1:
            raise SearchError(
                f"the device's memory does not hold one line of {len(batch[0].tokens)} tokens "
                f"with beam={beam}; use a smaller beam or max_length, or a larger device"
            )
        cost = batch_cost(batch, beam)
        if self.batch_tokens == self.batching.budget(self.model.device.type):
            log.warning(
                "a batch of %d tokens does not fit in the device's memory; using smaller batches: "
                "to avoid the retry, reduce the number of tokens per batch",
                cost,
            )
        self.batch_tokens = cost // 2
        torch.cuda.empty_cache()

    def start(self, batch: Sequence[Job], beam: int) -> DecoderState:
        """Returns the decoder state of a batch after its sources or prompts."""
        tokens, capacity = self._tokens(batch), self._capacity(batch)
        lengths = torch.tensor([len(job.tokens) for job in batch], device=tokens.device)
        if isinstance(self.model, TranslationModel):
            return self.model.start(tokens, capacity, source_lengths=lengths, beam=beam)
        return self.model.start(tokens, capacity, prompt_lengths=lengths, beam=beam)

    def _tokens(self, batch: Sequence[Job]) -> Tensor:
        """Returns the sources or prompts of a batch: [rows, longest], right-padded."""
        width, pad = max(len(job.tokens) for job in batch), self.model.config.pad
        rows = [job.tokens + [pad] * (width - len(job.tokens)) for job in batch]
        return torch.tensor(rows, device=self.model.device)

    def step(self, tokens: Tensor, state: DecoderState) -> Tensor:
        """Runs the model's step; returns logits only for ids that the tokenizer has."""
        return self.model.step(tokens, state)[:, : self.vocab_size]


def _make_graphs(model: TranslationModel | LanguageModel, vocab_size: int) -> "GraphDecoder | None":
    """Returns a graph decoder for a model on a GPU, or None if the model cannot use one."""
    if model.device.type != "cuda":
        return None
    if find_spec("triton") is None:
        log.warning("decoding without CUDA graphs, which is slower: Triton is not installed")
        return None
    from writehead.decoding.graphs import GraphDecoder  # needs Triton, which is optional
    from writehead.model.fused import why_not

    reason = why_not(model)
    if reason is not None:
        log.warning("decoding without CUDA graphs, which is slower: %s", reason)
        return None
    return GraphDecoder(model, vocab_size)
