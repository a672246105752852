"""Servers that run in a thread of the tests, and engines whose steps wait."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx
import uvicorn

from texts import engine
from writehead.engine import Engine
from writehead.serving.app import make_app
from writehead.serving.models import Served
from writehead.serving.run import listen
from writehead.serving.settings import Limits, Settings

SECONDS = 30.0  # after which a test fails instead of waiting


def models() -> list[Served]:
    """A translation model from English to German, and a language model."""
    return [
        Served("toy-en-de", engine("translation"), ("en", "de")),
        Served("writer", engine("language")),
    ]


@contextlib.contextmanager
def serving(served: Sequence[Served], settings: Settings | None = None) -> Iterator[str]:
    """Runs a server in a thread; yields its URL."""
    bound = listen("127.0.0.1", 0)
    config = uvicorn.Config(
        make_app(served, settings), access_log=False, log_config=None, timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([bound],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(SECONDS)


@contextlib.contextmanager
def client(served: Sequence[Served], **limits: Any) -> Iterator[httpx.Client]:
    """A client of a server with these limits."""
    with (
        serving(served, Settings(limits=Limits(**limits))) as url,
        httpx.Client(
            base_url=url, timeout=SECONDS, limits=httpx.Limits(max_connections=None)
        ) as http,
    ):
        yield http


class Paced:
    """Lets a scheduler run only as many steps as the test allows."""

    def __init__(self, one: Engine) -> None:
        self._step, self._allowed = one.scheduler.step, threading.Semaphore(0)
        one.scheduler.step = self.step  # type: ignore[method-assign]
        self.steps = 0

    def step(self, times: int = 1) -> bool:
        if not self._allowed.acquire(timeout=SECONDS):
            raise TimeoutError
        self.steps += 1
        return self._step(times)

    def allow(self, steps: int = 10**6) -> None:
        self._allowed.release(steps)


def until(holds: Callable[[], object]) -> None:
    """Waits until a condition holds."""
    end = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < end, "the condition never held"
        time.sleep(0.002)
