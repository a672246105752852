"""Cleans and encodes lines in worker processes.

Workers are spawned, not forked, so that no thread of the caller is copied halfway. They exit with
the process that started them, even if it is killed, and leave Ctrl-C to it.
"""

import hashlib
import multiprocessing
import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import chain
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from writehead.config import PrepareConfig
from writehead.data.dataset import token_dtype
from writehead.data.sources import Row
from writehead.data.tokenizer import MAX_PIECE, Tokenizer, normalise
from writehead.errors import DataError

EMPTY, TOO_LONG, DUPLICATE = "empty", "too long", "duplicate"
IDENTICAL, RATIO = "source and target identical", "lengths too unlike"
HELD_OUT = "also in the held-out text"
REASONS = (EMPTY, TOO_LONG, IDENTICAL, RATIO, DUPLICATE, HELD_OUT)
RATIO_SLACK = 4  # tokens added to the shorter side, because one word decides little in "Yes."
CHUNK_LINES, CHUNK_CHARACTERS = 2000, 1 << 20
CHUNKS_PER_WORKER = 2  # in progress at a time


def chunked(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Groups rows into chunks of limited size."""
    chunk: list[Row] = []
    characters = 0
    for row in rows:
        chunk.append(row)
        characters += sum(map(len, row))
        if len(chunk) == CHUNK_LINES or characters > CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


@dataclass(frozen=True, eq=False)
class Encoded:
    """The lines of a chunk that are kept, as indices into its `total` lines.

    lengths, tokens: one array per side; the tokens of all lines are concatenated.
    dropped: the number of other lines by reason. normalised: how many lines normalising changed.
    """

    total: int
    lines: NDArray[np.int64]
    hashes: NDArray[np.uint64]
    lengths: tuple[NDArray[np.int64], ...]
    tokens: tuple[NDArray[np.unsignedinteger], ...]
    dropped: Counter[str]
    normalised: int


def encode_chunk(
    chunk: list[Row], tokenizer: Tokenizer, config: PrepareConfig, is_train: bool
) -> Encoded:
    """Encodes a chunk; only the training split drops lines that a model could read."""
    # no token has more characters than MAX_PIECE, so a cut text still exceeds the limit
    cut = None if config.token_limit is None else config.token_limit * MAX_PIECE + 1
    texts = [tuple(map(normalise, row)) for row in chunk]
    ids = [
        tokenizer.encode_all([text[:cut] for text in side], threads=1)
        for side in zip(*texts, strict=True)
    ]
    reasons = [
        _reason(text, list(map(len, tokens)), config, is_train)
        for text, tokens in zip(texts, zip(*ids, strict=True), strict=True)
    ]
    kept = [i for i, reason in enumerate(reasons) if reason is None]
    sides = [[side[i] for i in kept] for side in ids]
    dtype = token_dtype(tokenizer.vocab_size)
    return Encoded(
        total=len(chunk),
        lines=np.array(kept, dtype=np.int64),
        hashes=np.array([_hash(texts[i]) for i in kept], dtype=np.uint64),
        lengths=tuple(np.array(list(map(len, side)), dtype=np.int64) for side in sides),
        tokens=tuple(np.fromiter(chain.from_iterable(side), dtype=dtype) for side in sides),
        dropped=Counter(reason for reason in reasons if reason is not None),
        normalised=sum(a != b for a, b in zip(chunk, texts, strict=True)),
    )


def _reason(
    texts: Sequence[str], lengths: Sequence[int], config: PrepareConfig, is_train: bool
) -> str | None:
    """Why a line is dropped, or None."""
    limit = config.token_limit
    if not all(texts):
        return EMPTY
    if limit is not None and max(map(len, texts)) > limit * MAX_PIECE:
        return TOO_LONG
    if is_train and len(texts) == 2 and texts[0] == texts[1]:
        return IDENTICAL
    if limit is not None and max(lengths) > limit:
        return TOO_LONG
    if is_train and max(lengths) > config.max_ratio * (min(lengths) + RATIO_SLACK):
        return RATIO
    return None


def _hash(texts: Iterable[str]) -> int:
    """A 64-bit hash of a line, to find duplicates."""
    joined = "\n".join(texts).encode()
    return int.from_bytes(hashlib.blake2b(joined, digest_size=8).digest(), "little")


def encode_all(
    rows: Iterable[Row], tokenizer: Path, config: PrepareConfig, is_train: bool, workers: int
) -> Iterator[Encoded]:
    """Encodes rows in order, with few chunks of them in memory at a time."""
    if workers == 1:
        loaded = Tokenizer.load(tokenizer)
        for chunk in chunked(rows):
            yield encode_chunk(chunk, loaded, config, is_train)
        return
    pending = deque[Future[Encoded]]()
    with _pool(workers) as pool:
        for chunk in chunked(rows):
            if len(pending) == CHUNKS_PER_WORKER * workers:
                yield pending.popleft().result()
            pending.append(_submit(pool, _encode, chunk, tokenizer, config, is_train))
        while pending:
            yield pending.popleft().result()


_load = cache(Tokenizer.load)


def _encode(chunk: list[Row], tokenizer: Path, config: PrepareConfig, is_train: bool) -> Encoded:
    return encode_chunk(chunk, _load(tokenizer), config, is_train)


@contextmanager
def _pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_exit_with_parent)
    try:
        yield pool
    except (BrokenProcessPool, OSError) as error:  # OSError if it is just closing its pipes
        raise DataError(
            "a worker process was killed, perhaps because memory ran out; use fewer workers"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _submit(pool: ProcessPoolExecutor, task: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """Submits a task; a worker that this starts inherits the blocked SIGINT."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return pool.submit(task, *arguments)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _exit_with_parent() -> None:
    """Makes a worker exit as soon as its parent is gone, even if that was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
