"""Generators that work on groups of items in another thread, while the caller does other work."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from itertools import islice
from typing import TypeVar

BACKGROUND_ITEMS = 64  # a smaller group is worked on in the calling thread
BACKGROUND_GROUPS = 4  # groups that may wait

T = TypeVar("T")
R = TypeVar("R")


def work_ahead(items: Iterator[T], work: Callable[[list[T]], R], size: int) -> Iterator[R]:
    """Yields `work(group)` for groups of `size` items; another thread works on the next group."""
    group = list(islice(items, size))
    if len(group) < size:
        yield work(group)
        return
    with ThreadPoolExecutor(1) as thread:
        result = thread.submit(work, group)
        while group:
            done = result.result()
            group = list(islice(items, size))
            result = thread.submit(work, group)
            yield done


def work_behind(groups: Generator[list[T]], work: Callable[[list[T]], Iterable[R]]) -> Iterator[R]:
    """Yields the results of each group in order; another thread works on large groups.

    If `groups` fails, the results of the groups before the failure come first.
    """
    pending: deque[Future[Iterable[R]]] = deque()
    failure: Exception | None = None
    with closing(groups), ThreadPoolExecutor(1) as thread:
        while True:
            try:
                group = next(groups, None)
            except Exception as error:
                failure, group = error, None
            if group is None:
                break
            if pending or len(group) >= BACKGROUND_ITEMS:
                pending.append(thread.submit(work, group))
            else:
                yield from work(group)
            while pending and (pending[0].done() or len(pending) > BACKGROUND_GROUPS):
                yield from pending.popleft().result()
        while pending:
            yield from pending.popleft().result()
    if failure is not None:
        raise failure
