"""A server in a process of its own, for benchmarks."""

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from socket import socket

from writehead.bench.static_batching import load_engine
from writehead.errors import RunError
from writehead.serving.models import Served, pair_of
from writehead.serving.run import limit_batch, listen, run_server
from writehead.serving.settings import Limits, Settings
from writehead.util.threads import run_alone, use_threads

STOP_SECONDS = 30.0
LIMITS = Limits(queue=100_000, deadline=600.0, grace=5)  # a benchmark shows the queue


@dataclass(frozen=True)
class ChildOptions:
    """How a benchmark loads a run, and how it forms batches."""

    run: Path
    device: str
    dtype: str | None
    threads: int | None
    batching: str
    max_rows: int | None
    pair: tuple[str, str] | None = None  # None: as its name says


@contextmanager
def child_server(options: ChildOptions) -> Iterator[str]:
    """Serves a run; yields its URL, which answers once the model is loaded."""
    bound = listen("127.0.0.1", 0)
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_serve, args=(options, bound), daemon=True)
    url = f"http://127.0.0.1:{bound.getsockname()[1]}"
    process.start()
    bound.close()  # otherwise, clients of a server that fails to start would wait for it
    try:
        yield url
        if not process.is_alive():
            raise RunError("the server has stopped; look at its messages above")
    finally:
        process.terminate()
        process.join(STOP_SECONDS)
        process.kill()


def _serve(options: ChildOptions, bound: socket) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the benchmark stops this process
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the lines about requests
    use_threads(options.threads)
    engine = run_alone(
        lambda: load_engine(options.batching, options.run, options.device, options.dtype)
    )
    limit_batch(engine, options.max_rows)
    name = options.run.resolve().name
    pair = options.pair or pair_of(name)
    run_server([Served(name, engine, pair)], Settings(limits=LIMITS), bound)
