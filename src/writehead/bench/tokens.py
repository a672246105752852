"""`bench tokens`: the same tokens as float32 on a CPU, in every dtype, search and batch.

The reference is the plain path, `model.step` and `decoding.beam`, in float32 on the CPU. Ours is
what an engine decodes by, with captured graphs where it has them. Where they differ, `ties.py` says
whether rounding explains it; the answers that it does not explain are those to look at.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from writehead.bench.ties import (
    EPSILON,
    FACTOR,
    BeamJudge,
    Parting,
    judge_greedy,
    moments,
    said,
)
from writehead.bench.translate import ALPHA
from writehead.config import DecodeConfig
from writehead.data.tokenizer import EOS, Tokenizer
from writehead.decoding import Batching, Engine, Hypothesis, beam_search
from writehead.decoding.batching import EXTRA_TOKENS, Job, batch_cost, longest_first, take_batch
from writehead.decoding.beam import BeamStep
from writehead.decoding.worker import Worker
from writehead.errors import ConfigError, DataError
from writehead.model import TranslationModel
from writehead.model.bundled import name_of

BATCH_TOKENS = 16_384  # of the reference
TOGETHER = 8  # sentences whose logits at all positions are held at once
ALONE, SHUFFLED = "one at a time", "shuffled"
AGAIN = {ALONE: Batching(tokens=1), SHUFFLED: Batching(lines=37)}  # windows that mix the lengths


@dataclass(frozen=True)
class Plan:
    """What to decode with what, and whom to tell.

    lines: (number from 1, text). empty: the numbers of those passed over on the way.
    """

    run: Path
    lines: list[tuple[int, str]]
    device: torch.device
    dtypes: tuple[torch.dtype, ...]
    beams: tuple[int, ...]
    tell: Callable[[str], None]
    empty: list[int]

    def __post_init__(self) -> None:
        for beam in self.beams:
            DecodeConfig(beam=beam, alpha=ALPHA)
        if not self.lines:
            raise DataError("there is no line to translate; give a file with text in it")


@dataclass(frozen=True)
class Sentences:
    """What is decoded: jobs, and the numbers of the lines that they are."""

    jobs: list[Job]
    numbers: list[int]


def bench_tokens(plan: Plan, result: dict[str, Any], save: Callable[[], None]) -> None:
    """Fills `result`: how many sentences got the reference's tokens, which did not, by how much.

    It is saved after each count. `others` counts those that rounding cannot explain.
    """
    plan.tell(f"reference: loading {plan.run}")
    engine = Engine.load(plan.run, "cpu", torch.float32, graphs=False)
    model = engine.model
    if not isinstance(model, TranslationModel):
        raise ConfigError(f"{plan.run} is a language model, which translates no lines")
    sentences, too_long = _sentences(plan.lines, engine.tokenizer, model)
    rows: list[dict[str, Any]] = []
    result |= {
        "run": name_of(plan.run),
        "sentences": len(sentences.jobs),
        "left_out": too_long,
        "empty": sorted([*plan.empty, *_without(plan.lines, sentences.numbers + too_long)]),
        "device": plan.device.type,
        "reference": "float32 on the CPU, step by step",
        "alpha": ALPHA,
        "tolerance": {
            "factor": FACTOR,
            "epsilon": {_name(dtype): EPSILON[dtype] for dtype in plan.dtypes},
        },
        "rows": rows,
        "others": 0,
    }
    references = {}
    for beam in plan.beams:
        plan.tell(f"reference: {len(sentences.jobs):,} sentences, {_search(beam)}")
        references[beam] = Reference(model, engine.tokenizer.vocab_size, sentences.jobs, beam)
    for dtype in plan.dtypes:
        for _ in _count(plan, dtype, sentences, references, rows):
            result["others"] = sum(len(row["others"]) for row in rows)
            save()


def _sentences(
    lines: list[tuple[int, str]], tokenizer: Tokenizer, model: TranslationModel
) -> tuple[Sentences, list[int]]:
    """The lines as an engine would decode them, and the numbers of those that it would cut."""
    config, jobs, numbers, too_long = model.config, [], [], []
    for number, line in lines:
        tokens = tokenizer.encode(line)
        if not tokens:
            continue
        if len(tokens) >= config.source_positions:
            too_long.append(number)
            continue
        length = min(len(tokens) + EXTRA_TOKENS, config.target_positions)
        jobs.append(Job([*tokens, EOS], length))
        numbers.append(number)
    if not jobs:
        raise DataError(
            f"none of {len(lines)} lines has from 1 to {config.source_positions - 1} tokens, which "
            f"is what the model reads at once; give others"
        )
    return Sentences(jobs, numbers), too_long


def _without(lines: list[tuple[int, str]], known: list[int]) -> set[int]:
    """The numbers of lines that are not known: those without a token."""
    return {number for number, _ in lines} - set(known)


class Reference:
    """What float32 on the CPU finds for each job, and all that is needed to judge others by it."""

    def __init__(
        self, model: TranslationModel, vocab_size: int, jobs: list[Job], beam: int
    ) -> None:
        self.jobs, self.beam = jobs, beam
        self._model, self._vocab_size = model, vocab_size
        found: dict[int, Hypothesis] = {}
        self._steps: dict[int, tuple[list[BeamStep], int]] = {}  # and where in its batch
        self._known: dict[tuple[int, tuple[int, ...], float, float], Parting] = {}
        # the plain path of an engine; its batches are made here, to watch each of them
        worker = Worker(model, vocab_size, Batching(tokens=BATCH_TOKENS), graphs=False)
        order = longest_first(jobs)
        while order:
            some = [jobs[i] for i in order]
            count = take_batch(some, lambda part: batch_cost(part, beam) <= BATCH_TOKENS)
            steps: list[BeamStep] = []
            results = _search_batch(worker, some[:count], beam, steps)
            for row, (i, [best, *_]) in enumerate(zip(order[:count], results, strict=True)):
                found[i], self._steps[i] = best, (steps, row)
            order = order[count:]
        self.found = [found[i] for i in range(len(jobs))]

    def partings(self, found: Sequence[Hypothesis], dtype: torch.dtype) -> dict[int, Parting]:
        """Where each of what was found in a dtype parts from the reference's; those only that do.

        They are by their place among the jobs.
        """
        parted = {
            i: (i, said(ours), ours.log_probability, EPSILON[dtype])
            for i, (ours, right) in enumerate(zip(found, self.found, strict=True))
            if said(ours) != said(right)
        }
        new = [i for i, key in parted.items() if key not in self._known]
        forced = self._forced(
            [(i, said((self.found if self.beam == 1 else found)[i])) for i in new]
        )
        for i, logits in zip(new, forced, strict=True):
            self._known[parted[i]] = self._judge(i, found[i], logits, EPSILON[dtype])
        return {i: self._known[key] for i, key in parted.items()}

    def _judge(self, i: int, ours: Hypothesis, logits: Tensor, epsilon: float) -> Parting:
        """logits [n, vocab_size]: along what the reference found, or with beams what ours did."""
        right = self.found[i]
        if self.beam == 1:
            return judge_greedy(right, ours, logits, epsilon)
        log_p = torch.log_softmax(logits.double(), dim=1)
        mine = torch.tensor(said(ours)).unsqueeze(1)
        totals = log_p.gather(1, mine).squeeze(1).cumsum(0).tolist()
        judge = BeamJudge(right, moments(*self._steps[i]), self.beam, ALPHA, epsilon)
        return judge.judge(ours, totals)

    @torch.no_grad()
    def _forced(self, wanted: list[tuple[int, tuple[int, ...]]]) -> Iterator[Tensor]:
        """Logits [n, vocab_size] at each token of what is said for a job, by whole passes."""
        start = self._model.config.bos
        for first in range(0, len(wanted), TOGETHER):
            some = wanted[first : first + TOGETHER]
            sources = [self.jobs[i].tokens for i, _ in some]
            fed = [[start, *tokens[:-1]] for _, tokens in some]
            lengths = torch.tensor([len(source) for source in sources])
            logits = self._model(_padded(sources), _padded(fed), source_lengths=lengths)
            for row, (_, tokens) in zip(logits, some, strict=True):
                yield row[: len(tokens), : self._vocab_size]


def _search_batch(
    worker: Worker, batch: list[Job], beam: int, steps: list[BeamStep]
) -> list[list[Hypothesis]]:
    """The hypotheses of each job, step by step; the steps of a beam search are put into `steps`."""

    def note(step: BeamStep) -> None:
        # a copy of the tokens so far only, and of half the size
        steps.append(replace(step, tokens=step.tokens.to(torch.int32)))

    limits = [job.max_length for job in batch]
    config = DecodeConfig(beam=beam, alpha=ALPHA, max_length=max(limits))
    state = worker.start(batch, beam)
    return beam_search(worker.step, state, config, eos=EOS, max_lengths=limits, observe=note)


def _count(
    plan: Plan,
    dtype: torch.dtype,
    sentences: Sentences,
    references: dict[int, Reference],
    rows: list[dict[str, Any]],
) -> Iterator[None]:
    """Adds what ours finds in a dtype to `rows`, search by search; stops at each new count."""
    plan.tell(f"ours, {_name(dtype)}: loading {plan.run}")
    engine = Engine.load(plan.run, plan.device, dtype, graphs=False)
    vocab_size = engine.tokenizer.vocab_size
    workers = {
        name: Worker(engine.model, vocab_size, batching)
        for name, batching in {"": Batching(), **AGAIN}.items()
    }
    for beam, reference in references.items():
        plan.tell(f"ours, {_name(dtype)}: {len(sentences.jobs):,} sentences, {_search(beam)}")
        first = decode(workers[""], sentences.jobs, beam)
        parted = reference.partings(first, dtype)
        row: dict[str, Any] = {
            "dtype": _name(dtype),
            "beam": beam,
            "same": len(sentences.jobs) - len(parted),
            **_named(parted, sentences),
            "batches": {},
        }
        rows.append(row)
        yield
        for name in AGAIN:
            plan.tell(f"ours, {_name(dtype)}: {name}, {_search(beam)}")
            again = _again(workers[name], sentences.jobs, beam)
            changed = [i for i in range(len(first)) if said(first[i]) != said(again[i])]
            row["batches"][name] = _changes(
                changed, parted, reference.partings(again, dtype), sentences
            )
            yield


def decode(worker: Worker, jobs: Sequence[Job], beam: int) -> list[Hypothesis]:
    """The best hypothesis of each job."""
    options = DecodeConfig(beam=beam, alpha=ALPHA)
    return [best for _, [[best, *_]] in worker.work(([job] for job in jobs), options, None)]


def _again(worker: Worker, jobs: list[Job], beam: int) -> list[Hypothesis]:
    """What `decode` finds for the same jobs in another order."""
    order = list(range(len(jobs)))
    random.Random(1).shuffle(order)
    found = dict(zip(order, decode(worker, [jobs[i] for i in order], beam), strict=True))
    return [found[i] for i in range(len(jobs))]


def _changes(
    changed: list[int],
    first: dict[int, Parting],
    again: dict[int, Parting],
    sentences: Sentences,
) -> dict[str, Any]:
    """Sentences whose tokens other batches changed: by near-ties, if each is one or the same."""
    lines: dict[str, list[int]] = {"near_ties": [], "unproved": [], "others": []}
    for i in changed:
        found = [parted[i] for parted in (first, again) if i in parted]
        near = all(one.is_near for one in found)
        unproved = all(one.is_near or one.is_unproved for one in found)
        kind = "near_ties" if near else "unproved" if unproved else "others"
        lines[kind].append(sentences.numbers[i])
    return {"changed": len(changed), **lines}


def _named(parted: dict[int, Parting], sentences: Sentences) -> dict[str, list[dict[str, Any]]]:
    """Partings by line: those that are near-ties, those that may come of one, and the others."""
    named: dict[str, list[dict[str, Any]]] = {"near_ties": [], "unproved": [], "others": []}
    for i, parting in parted.items():
        kind = "near_ties" if parting.is_near else "unproved" if parting.is_unproved else "others"
        named[kind].append({"line": sentences.numbers[i], **asdict(parting)})
    return named


def _padded(rows: list[list[int]]) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [0] * (width - len(row)) for row in rows])


def _search(beam: int) -> str:
    return "greedy" if beam == 1 else f"beam {beam}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
