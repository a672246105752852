"""Runs the application with uvicorn until SIGTERM or Ctrl-C, then finishes what it decodes."""

import errno
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import product
from types import FrameType

from writehead.config import DecodeConfig
from writehead.engine import Engine
from writehead.engine.engine import BEAM
from writehead.errors import ConfigError
from writehead.serving.app import make_app, requests_log
from writehead.serving.models import Served
from writehead.serving.settings import Settings
from writehead.util.extras import requires
from writehead.util.garbage import frozen_objects
from writehead.util.threads import run_alone

with requires("serve"):
    import uvicorn

CPU_FRACTION = 0.5  # of the free memory that lanes may use
WARMUP_TEXTS = {"cuda": (1, 16, 64, 256)}  # the sizes of CUDA graphs
CPU_ROWS = 64  # decoded together by default; with more, K and V do not fit in a CPU's caches
SWITCH_SECONDS = 5e-5  # how long the event loop may hold the GIL while a step waits for it
BACKLOG = 4096  # connections that wait to be accepted


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket that is bound to an address."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        bound = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        if isinstance(error, OSError) and error.errno and error.errno in errno.errorcode:
            reason = os.strerror(error.errno)  # `create_server` adds the address to it
        raise ConfigError(f"cannot listen on {host}:{port}: {reason}") from error
    return bound


def run_server(models: Sequence[Served], settings: Settings, bound: socket.socket) -> None:
    """Serves until a signal; then refuses connections and finishes requests for `grace` seconds."""
    sys.setswitchinterval(SWITCH_SECONDS)
    app = make_app(models, settings)
    for one in models:
        run_alone(partial(warm_up, one))
    share_memory(models)
    # lines are numbered within a request, and answers tell the number of pieces
    logging.getLogger("writehead.data.lines").setLevel(logging.ERROR)
    requests_log.propagate = False
    requests_log.setLevel(logging.INFO)
    handler = logging.StreamHandler(sys.stdout)
    requests_log.addHandler(handler)
    config = uvicorn.Config(
        app,
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=settings.limits.grace,
    )
    host, port = bound.getsockname()[:2]
    place = f"[{host}]" if ":" in host else host
    names = ", ".join(one.name for one in models)
    print(f"serving {names} on http://{place}:{port}", file=sys.stderr, flush=True)
    # uvicorn repeats the signal that stopped it, once all requests are finished
    before = signal.signal(signal.SIGTERM, _ignore)
    try:
        with suppress(KeyboardInterrupt), frozen_objects():
            _Server(config).run([bound])
    finally:
        signal.signal(signal.SIGTERM, before)
        requests_log.removeHandler(handler)


class _Server(uvicorn.Server):
    """A server that exits at once on a second Ctrl-C; uvicorn would print tracebacks."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit and sig == signal.SIGINT:
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)
        super().handle_exit(sig, frame)


def limit_batch(engine: Engine, rows: int | None) -> None:
    """Sets the maximum rows of a batch; None chooses the server's default for the device."""
    if rows is None and engine.model.device.type == "cpu":
        rows = CPU_ROWS
    if rows is not None:
        engine.scheduler.max_rows = rows


def warm_up(model: Served) -> None:
    """Decodes words, which compiles kernels and captures graphs that requests would wait for.

    There are graphs for one step, which streams use, and for several, with and without sampling.
    """
    engine, tokenizer = model.engine, model.engine.tokenizer
    source = min(tokenizer.source_languages, default=None)
    target = min(tokenizer.target_languages, default=None)
    searches = [DecodeConfig(beam=1, max_length=2)]
    if model.translates:
        searches.append(DecodeConfig(beam=BEAM, max_length=2))
    else:
        searches.append(DecodeConfig(temperature=1.0, max_length=2))
    for count in WARMUP_TEXTS.get(engine.model.device.type, (1,)):
        for search, is_streamed in product(searches, (False, True)):
            words = ["a"] * count
            lines = engine.requests(words, search, source_lang=source, target_lang=target)
            requests = [request for line in lines for request in line]
            for request in requests:
                request.on_tokens = _ignore if is_streamed else None
            engine.scheduler.submit(requests)
            while engine.scheduler.step():
                pass


def share_memory(models: Sequence[Served]) -> None:
    """Divides the memory for lanes among models, after `warm_up`; also limits it on a CPU.

    Each beam size has its own lane. Without a limit, idle lanes would never be dropped.
    """
    for one in models:
        scheduler = one.engine.scheduler
        if one.engine.model.device.type == "cpu":
            with suppress(AttributeError, ValueError):  # not on this system
                free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
                scheduler.memory = min(scheduler.memory, CPU_FRACTION * free)
        scheduler.memory /= len(models)


def _ignore(*arguments: object) -> None:
    pass
