"""Other processes: chunks of lines to tokens on all cores, and learning the tokenizer.

Processes are spawned rather than forked, so that no thread of the caller's is copied half-way.
They die with the process that started them, however that dies, and leave Ctrl-C to it.
"""

import multiprocessing
import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, cycle
from multiprocessing.connection import Connection, wait
from pathlib import Path
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

from writehead.config import PrepareConfig
from writehead.data import cleaning
from writehead.data.dataset import token_dtype
from writehead.data.sources import Chunk
from writehead.data.tokenizer import MAX_PIECE, Tokenizer
from writehead.errors import DataError

AHEAD = 2  # chunks that a worker has at a time

Array = NDArray[np.unsignedinteger]


@dataclass(frozen=True, eq=False)
class Encoded:
    """What is left of a chunk: its lines' indices, fingerprints, and tokens side by side.

    lengths, tokens: an array a side; the tokens of all lines follow one another.
    dropped: how many lines were left out, by reason. normalised: how many were
    not as they should be, and were put right.
    """

    read: int
    done: float
    lines: NDArray[np.int64]
    fingerprints: NDArray[np.uint64]
    lengths: tuple[NDArray[np.int64], ...]
    tokens: tuple[Array, ...]
    dropped: Counter[str]
    normalised: int


class Encoder:
    """Cleans and encodes chunks; of held-out text (`strict=False`) all is kept that can be used."""

    def __init__(self, config: PrepareConfig, tokenizer: Tokenizer) -> None:
        self.config, self.tokenizer = config, tokenizer
        self.dtype = token_dtype(tokenizer.vocab_size)

    def __call__(self, chunk: Chunk, strict: bool) -> Encoded:
        """The chunk's usable lines as tokens."""
        rows = list(zip(*chunk.sides, strict=True))
        texts = [self._normal(row) for row in rows]
        normalised = sum(
            text is not None and text != row for text, row in zip(texts, rows, strict=True)
        )
        reasons = [self._refused(text, strict) for text in texts]
        kept = [i for i, reason in enumerate(reasons) if reason is None]
        columns = [
            self.tokenizer.encode_all([row[side] for i in kept if (row := texts[i])], threads=1)
            for side in range(len(chunk.sides))
        ]
        for place, i in enumerate(kept):
            reasons[i] = self._refused_tokens([len(column[place]) for column in columns], strict)
        places = [place for place, i in enumerate(kept) if reasons[i] is None]
        lines = [kept[place] for place in places]
        ids = [[column[place] for place in places] for column in columns]
        return Encoded(
            read=len(chunk),
            done=chunk.done,
            lines=np.array(lines, dtype=np.int64) + chunk.first,
            fingerprints=np.array(
                [cleaning.fingerprint(texts[i] or ()) for i in lines], dtype=np.uint64
            ),
            lengths=tuple(np.array([len(x) for x in side], dtype=np.int64) for side in ids),
            tokens=tuple(np.fromiter(chain.from_iterable(s), dtype=self.dtype) for s in ids),
            dropped=Counter(reason for reason in reasons if reason is not None),
            normalised=normalised,
        )

    def _normal(self, row: tuple[str | None, ...]) -> tuple[str, ...] | None:
        """The row's texts, normalised; None where one is too long to be text."""
        texts = tuple(cleaning.normalise(text) for text in row if text is not None)
        return texts if len(texts) == len(row) else None

    def _refused(self, texts: tuple[str, ...] | None, strict: bool) -> str | None:
        """Why a row is left out before it is encoded."""
        if texts is None:
            return cleaning.TOO_LONG
        if not all(texts):
            return cleaning.EMPTY
        limit = self.config.token_limit
        # no token has more characters than MAX_PIECE, so encoding it would only confirm this
        if limit is not None and max(map(len, texts)) > limit * MAX_PIECE:
            return cleaning.TOO_LONG
        if strict and len(texts) == 2 and texts[0] == texts[1]:
            return cleaning.IDENTICAL
        return None

    def _refused_tokens(self, lengths: list[int], strict: bool) -> str | None:
        """Why a row is left out once its lengths in tokens are known."""
        limit = self.config.token_limit
        if limit is not None and max(lengths) > limit:
            return cleaning.TOO_LONG
        if strict and len(lengths) == 2 and cleaning.unlike(lengths, self.config.max_ratio):
            return cleaning.RATIO
        return None


def encode(
    chunks: Iterable[Chunk], encoder: Encoder, strict: bool, workers: int
) -> Iterator[Encoded]:
    """The chunks encoded, in their order, with few of them in memory at a time."""
    if workers == 1:
        for chunk in chunks:
            yield encoder(chunk, strict)
        return
    pool: list[_Worker] = []
    # each worker answers in the order it was asked, so asking in turn gives all in order
    asked: deque[_Worker] = deque()
    try:
        for _ in range(workers):
            pool.append(_Worker(encoder))
        for chunk, worker in zip(chunks, cycle(pool), strict=False):
            if len(asked) == AHEAD * workers:
                yield asked.popleft().answer()
            worker.ask(chunk, strict)
            asked.append(worker)
        while asked:
            yield asked.popleft().answer()
    finally:
        for worker in pool:
            worker.stop()


class _Worker:
    """Another process that encodes the chunks it is sent."""

    def __init__(self, encoder: Encoder) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        arguments = (theirs, encoder.config, encoder.tokenizer.model)
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        with _interrupts_held():
            self._process.start()
        theirs.close()

    def ask(self, chunk: Chunk, strict: bool) -> None:
        """Sends a chunk; its answer is to be fetched later."""
        with _expected_alive():
            self._connection.send((chunk, strict))

    def answer(self) -> Encoded:
        """The oldest chunk not yet answered."""
        with _expected_alive():
            answer: Encoded = self._connection.recv()
        return answer

    def stop(self) -> None:
        """Ends the process, whatever it is doing: it has nothing to lose."""
        self._process.kill()
        self._process.join()
        self._connection.close()


def _serve(connection: Connection, config: PrepareConfig, model: bytes) -> None:
    """A worker's life: answers what it is sent until the other end is gone."""
    encoder = Encoder(config, Tokenizer(model))
    tasks: SimpleQueue[tuple[Chunk, bool]] = SimpleQueue()

    def read() -> None:
        try:
            while True:
                tasks.put(connection.recv())
        except (EOFError, OSError):
            os._exit(0)

    # read in a thread, so that neither end waits for the other to read while it writes
    threading.Thread(target=read, daemon=True).start()
    while True:
        answer = encoder(*tasks.get())
        try:
            connection.send(answer)
        except OSError:
            os._exit(0)


@contextmanager
def _expected_alive() -> Iterator[None]:
    try:
        yield
    except (EOFError, ConnectionError) as error:
        raise DataError(
            "a worker process was killed, perhaps because memory ran out; use fewer workers"
        ) from error


def learn_tokenizer(
    sample: Path, config: PrepareConfig, workers: int, *, at_most: bool = False
) -> Tokenizer:
    """Learns a tokenizer from a file of lines, in its own process, which Ctrl-C can end.

    With `at_most`, a small text gives a smaller vocabulary than the config's.
    """
    if workers == 1:
        return _learn(sample, config, at_most)
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    arguments = (sample, config, at_most, sender)
    process = context.Process(target=_learn_and_send, args=arguments, daemon=True)
    with _interrupts_held():
        process.start()
    sender.close()
    try:
        answer: bytes | DataError = receiver.recv()
    except EOFError as error:
        raise DataError(
            "the process that learns the tokenizer was killed, perhaps because memory ran out; "
            "use a smaller sample"
        ) from error
    finally:
        process.kill()
        process.join()
    if isinstance(answer, DataError):
        raise answer
    return Tokenizer(answer)


def _learn(sample: Path, config: PrepareConfig, at_most: bool) -> Tokenizer:
    # text lines end with \n alone, and a sample's have nothing else in them that ends a line
    with sample.open(encoding="utf-8", newline="\n") as lines:
        stripped = (line.rstrip("\n") for line in lines)
        return Tokenizer.train(stripped, config.vocab_size, seed=config.seed, at_most=at_most)


def _learn_and_send(sample: Path, config: PrepareConfig, at_most: bool, sender: Connection) -> None:
    _die_with_parent()
    try:
        sender.send(_learn(sample, config, at_most).model)
    except DataError as error:
        sender.send(error)


def _die_with_parent() -> None:
    """Ends this process as soon as the one that started it is gone, even by kill -9."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """SIGINT kept until the end, and from processes started meanwhile: Ctrl-C is not theirs.

    They inherit the mask. Here another thread may take the signal for the main one, so the
    handler waits too: a process whose start is cut short would say so at length.
    """
    came: list[int] = []
    own = signal.getsignal(signal.SIGINT)
    is_ours = threading.current_thread() is threading.main_thread() and own is not None
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    if is_ours:
        signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        if is_ours:
            signal.signal(signal.SIGINT, own)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if came:
        signal.raise_signal(signal.SIGINT)
