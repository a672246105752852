"""Requests for a scheduler, and the result of decoding each of them alone."""

import copy
import random as plain_random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count

import torch
from torch import Tensor

from helpers import config, model
from search_toys import assert_ranked
from writehead.config import DecodeConfig
from writehead.engine import Hypothesis, beam_search, greedy, sample
from writehead.engine.runner import Model
from writehead.engine.scheduler import Request, Scheduler
from writehead.engine.search import Targets
from writehead.model import TranslationModel

EOS = 1
GREEDY = DecodeConfig()
SAMPLING = [
    DecodeConfig(temperature=1.0),
    DecodeConfig(temperature=0.7, top_k=9),
    DecodeConfig(temperature=1.5, top_p=0.8, min_p=0.02),
    DecodeConfig(temperature=0.9, repetition_penalty=1.6),
    DecodeConfig(repetition_penalty=2.0, beam=1),
]
# with few tokens to choose from, rounding in float32 hardly ever changes the choice
NARROW = [
    DecodeConfig(temperature=0.7, top_k=4),
    DecodeConfig(temperature=1.5, top_k=6, top_p=0.8, min_p=0.02, repetition_penalty=1.6),
]
BEAMS = [
    DecodeConfig(beam=2, n_best=2),
    DecodeConfig(beam=3, n_best=3, alpha=1.1),
    DecodeConfig(beam=3, alpha=-0.5),
]


def make(task: str, dtype: torch.dtype = torch.float32, **changes: object) -> Model:
    """A model with random weights that ends some of its texts."""
    sizes: dict[str, object] = {"decoder_layers": 2, "logit_scale": 0.4}
    sizes |= {"encoder_layers": 1} if task == "translation" else {}
    made = model(config(task, **(sizes | changes)), dtype=dtype)
    with torch.no_grad():
        made.tokens.weight[EOS] *= 2.0
        if made.config.output_bias:
            made.output_bias[EOS] += 1.0
    return made


@dataclass(frozen=True)
class Task:
    """A request that can be created several times."""

    tokens: tuple[int, ...]
    config: DecodeConfig
    max_length: int
    seed: int = 0
    prefix: tuple[int, ...] = ()

    def request(self) -> Request:
        return Request(self.config, self.max_length, self.prefix, self.seed, self.tokens)


def draw_tasks(
    made: Model,
    configs: Sequence[DecodeConfig],
    number: int,
    *,
    longest: int = 9,
    limit: int = 11,
    seed: int = 0,
) -> list[Task]:
    """Tasks of different lengths and limits, of each config in turn."""
    draw, tasks = plain_random.Random(seed), []
    for i in range(number):
        tokens = draw.choices(range(2, made.config.vocab_size), k=draw.randint(1, longest))
        most = draw.randint(2, limit)
        prefix = tuple(draw.choices(range(2, 9), k=draw.choice((0, 0, 1, 2))))
        least = draw.choice((0, 0, 2))
        asked = replace(configs[i % len(configs)], min_length=least)
        tasks.append(Task(tuple(tokens), asked, most, draw.randrange(99), prefix))
    return tasks


class Alone:
    """Decodes tasks one by one in float64 with `step` of a copy of a model; caches the results."""

    def __init__(self, made: Model, vocab_size: int | None = None) -> None:
        self.model, self.vocab_size = copy.deepcopy(made).cpu().double(), vocab_size
        self._known: dict[Task, list[Hypothesis]] = {}

    def decode(self, task: Task) -> list[Hypothesis]:
        if task not in self._known:
            self._known[task] = self._decode(task)
        return self._known[task]

    def _decode(self, task: Task) -> list[Hypothesis]:
        tokens, asked, made = torch.tensor([task.tokens]), task.config, self.model
        is_translation = isinstance(made, TranslationModel)
        capacity = task.max_length + (0 if is_translation else len(task.tokens) - 1)
        state = made.start(tokens, capacity, beam=asked.width)

        def step(fed: Tensor, state: object) -> Tensor:
            return made.step(fed, state)[:, : self.vocab_size]

        given = {"eos": EOS, "prefixes": [task.prefix], "max_lengths": [task.max_length]}
        if asked.temperature is not None:
            return sample(step, state, asked, seeds=[task.seed], **given)
        if asked.width == 1:
            return greedy(step, state, asked, **given)
        return beam_search(step, state, asked, **given)[0]

    def check(self, task: Task, request: Request, tolerance: float = 1e-4) -> None:
        """Asserts that a request has the result of decoding its task alone."""
        assert_ranked(hypotheses(request), self.decode(task), tolerance)


def hypotheses(request: Request) -> list[Hypothesis]:
    """The hypotheses of a request, with tuples of tokens, which can be compared."""
    return [one.with_tuple() for one in request.result()]


def scheduler(made: Model, vocab_size: int | None = None, **options: object) -> Scheduler:
    return Scheduler(made, Targets(vocab_size or made.config.vocab_size, EOS), **options)


def run(loop: Scheduler, requests: Sequence[Request]) -> None:
    """Steps until all requests are done."""
    while not all(request.is_done for request in requests):
        loop.step()


def run_mixed(
    loop: Scheduler, tasks: Sequence[Task], *, seed: int = 0, cancels: float = 0.0, most: int = 9
) -> list[tuple[Task, Request]]:
    """Submits up to `most` tasks at random times, and cancels some; returns the others, done.

    Some of the searches without beams are streamed, and must give the tokens of their result.
    """
    draw = plain_random.Random(seed)
    requests, streams = [task.request() for task in tasks], {}
    for i in range(0, len(tasks), 2):
        if tasks[i].config.width == 1:
            requests[i].on_tokens = streams.setdefault(i, []).extend
    doomed = {i for i in range(len(tasks)) if draw.random() < cancels}
    waiting, begun = list(range(len(tasks))), []
    for _ in count():
        if waiting and draw.random() < 0.5:
            now, waiting = waiting[: (k := draw.randint(1, most))], waiting[k:]
            loop.submit([requests[i] for i in now])
            begun += [i for i in now if i in doomed]
        while begun and draw.random() < 0.8:
            loop.cancel(requests[begun.pop(draw.randrange(len(begun)))])
        if not loop.step() and not waiting:
            break
    assert all(request.is_done for request in requests)
    for i in streams.keys() - doomed:
        assert tuple(streams[i]) == hypotheses(requests[i])[0].tokens
    return [(tasks[i], requests[i]) for i in range(len(tasks)) if i not in doomed]
