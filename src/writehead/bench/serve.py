"""`bench serve`: clients of a server, in a closed or an open loop, and their latencies."""

import asyncio
import json
import random
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from writehead.data.corpus import pairs
from writehead.errors import ConfigError, DataError, RunError, one_line, shown
from writehead.util.extras import requires

with requires("serve"):
    import aiohttp

PERCENTILES = (50, 90, 95, 99)
OURS, OPENAI, LIBRETRANSLATE = "writehead", "openai", "libretranslate"
APIS = (OURS, OPENAI, LIBRETRANSLATE)
SAMPLE_SECONDS = 1.0  # between two readings of the server's memory
PROCESS = re.compile(r"^process_(resident_memory_bytes|cpu_seconds_total) (\S+)", re.MULTILINE)
TIMEOUT = 600.0  # seconds until a client gives up

Report = Callable[[int], None]


@dataclass(frozen=True, kw_only=True)
class Load:
    """How requests arrive: `concurrency` clients, or `rate` requests per second, or both."""

    seconds: float
    concurrency: int | None = None  # requests at a time; None: no limit
    rate: float | None = None  # of a Poisson process; None: as fast as answers come
    seed: int = 0

    def __post_init__(self) -> None:
        if self.concurrency is None and self.rate is None:
            raise ConfigError("set a number of clients, a request rate, or both")
        if self.seconds <= 0 or (self.rate is not None and self.rate <= 0):
            raise ConfigError("the duration and the request rate must be above 0")


@dataclass(frozen=True, kw_only=True)
class Target:
    """A server, the API that is measured, and the options of its requests."""

    url: str
    api: str
    model: str | None = None
    key: str | None = None
    beam: int | None = None
    max_tokens: int = 64  # of a completion
    source: str | None = None
    target: str | None = None
    stream: bool = False

    def request(self, texts: Sequence[str]) -> tuple[str, dict[str, Any]]:
        """Returns the path and the body of a request; a single text is not sent as a list."""
        text = texts[0] if len(texts) == 1 else [*texts]
        if self.api == OPENAI:
            body = {"model": self.model, "prompt": text, "max_tokens": self.max_tokens}
            return "/v1/completions", {
                **body,
                "temperature": 0,
                "stream": self.stream,
                **({"stream_options": {"include_usage": True}} if self.stream else {}),
            }
        if self.api == LIBRETRANSLATE:
            key = {} if self.key is None else {"api_key": self.key}
            return "/translate", {
                "q": text,
                "source": self.source or "en",
                "target": self.target or "de",
                **key,
            }
        body = {"text": text, "stream": self.stream, "beam": self.beam, "model": self.model}
        body |= {"source": self.source, "target": self.target}
        return "/v1/translate", {name: value for name, value in body.items() if value is not None}


@dataclass
class Result:
    """What a client has seen of one request; times are in seconds."""

    texts: Sequence[str]
    started: float
    ended: float = 0.0
    first: float | None = None  # when the first piece of text came
    gaps: list[float] = field(default_factory=list)  # between pieces
    tokens: int | None = None
    answers: Sequence[str] = ()
    error: str | None = None
    reason: str = ""  # of the error, in the words of the server


class Process(NamedTuple):
    """What a server's process has used, in bytes and seconds."""

    at: float
    memory: float
    cpu: float


def mixed_texts(count: int, least: int, most: int, seed: int) -> list[str]:
    """Returns texts of the built-in corpus; the logarithm of their words is uniform."""
    if not 1 <= least <= most:
        raise ConfigError(f"words from {least} to {most} is not a range of at least 1")
    draw = random.Random(seed)
    sentences = [source for source, _ in pairs("test", 2_000, seed)]
    texts = []
    for _ in range(count):
        words: list[str] = []
        wanted = round(least * (most / least) ** draw.random())
        while len(words) < wanted:
            words += draw.choice(sentences).split()
        texts.append(" ".join(words[:wanted]))
    return texts


def measure(
    target: Target, load: Load, texts: Sequence[str], report: Report, size: int = 1
) -> dict[str, Any]:
    """Sends requests of `size` texts for a while; returns statistics, and all `results`."""
    return asyncio.run(_measure(target, load, _groups(target, texts, size), report))


def check_server(target: Target, texts: Sequence[str], size: int = 1) -> None:
    """Sends the first request; raises RunError with the reason if it fails."""
    result = asyncio.run(_ask_once(target, _groups(target, texts, size)[0]))
    if result.error is not None:
        raise RunError(
            f"{target.url} cannot be measured: the first request failed with {result.error}: "
            f"{one_line(result.reason, 300)}"
        )


def _groups(target: Target, texts: Sequence[str], size: int) -> list[list[str]]:
    if not texts:
        raise DataError("there is no text to send; use a file with text in it")
    if size > 1 and target.stream:
        raise ConfigError("a streamed request has one text")
    starts = range(0, len(texts), size)
    return [[texts[(first + i) % len(texts)] for i in range(size)] for first in starts]


async def find_model(url: str, key: str | None) -> str:
    """Returns the first model of a server with OpenAI's API."""
    async with _session(key) as session, session.get(f"{url}/v1/models") as response:
        text = await response.text()
    try:
        return str(json.loads(text)["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as error:
        raise RunError(f"{url}/v1/models lists no model: {shown(_reason(text), 300)}") from error


async def wait_until_ready(url: str) -> None:
    """Waits for the answer of a server that is about to start; raises RunError if none comes."""
    try:
        async with _session(None) as session, session.get(f"{url}/ready"):
            pass
    except (aiohttp.ClientError, TimeoutError) as error:
        raise RunError(f"no server answers at {shown(url)}; start the server first") from error


def _session(key: str | None) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        headers={} if key is None else {"Authorization": f"Bearer {key}"},
        timeout=aiohttp.ClientTimeout(TIMEOUT),
    )


async def _measure(
    target: Target, load: Load, groups: Sequence[Sequence[str]], report: Report
) -> dict[str, Any]:
    results: list[Result] = []
    seen: list[Process] = []
    async with _session(target.key) as session:
        watcher = asyncio.create_task(_watch(session, target.url, seen))
        began = time.perf_counter()

        async def ask(i: int) -> None:
            results.append(await _ask(session, target, groups[i % len(groups)]))
            report(min(int(time.perf_counter() - began), int(load.seconds)))

        if load.rate is None:
            await _closed_loop(ask, load, began)
        else:
            await _open_loop(ask, load, began)
        ended = time.perf_counter()
        watcher.cancel()
    return summarize(results, ended - began, seen) | {"load": asdict(load), "results": results}


async def _closed_loop(ask: Callable[[int], Any], load: Load, began: float) -> None:
    """Each client sends its next request when it has the answer to the last."""
    numbers = iter(range(10**12))

    async def client() -> None:
        while time.perf_counter() < began + load.seconds:
            await ask(next(numbers))

    await asyncio.gather(*(client() for _ in range(load.concurrency or 1)))


async def _open_loop(ask: Callable[[int], Any], load: Load, began: float) -> None:
    """Requests arrive at random, however long the answers take."""
    assert load.rate is not None
    draw, at = random.Random(load.seed), began
    tasks: list[asyncio.Task[None]] = []
    limit = asyncio.Semaphore(load.concurrency or 10**9)

    async def limited(i: int) -> None:
        async with limit:
            await ask(i)

    while (at := at + draw.expovariate(load.rate)) < began + load.seconds:
        await asyncio.sleep(max(0.0, at - time.perf_counter()))
        tasks.append(asyncio.create_task(limited(len(tasks))))
    await asyncio.gather(*tasks)


async def _ask_once(target: Target, texts: Sequence[str]) -> Result:
    async with _session(target.key) as session:
        return await _ask(session, target, texts)


async def _ask(session: aiohttp.ClientSession, target: Target, texts: Sequence[str]) -> Result:
    path, body = target.request(texts)
    result = Result(texts, time.perf_counter())
    try:
        async with session.post(target.url + path, json=body) as response:
            if response.status != 200:
                result.error = str(response.status)
                result.reason = _reason(await response.text(errors="replace"))
            elif target.stream:
                await _read_stream(response, result)
            else:
                _read_answer(await response.json(), result)
    except (aiohttp.ClientError, TimeoutError, ValueError, LookupError) as error:
        result.error, result.reason = type(error).__name__, str(error)
    result.ended = time.perf_counter()
    return result


def _reason(text: str) -> str:
    """Returns the sentence in a server's answer to a request that failed, or the whole answer."""
    found: Any = text
    with suppress(ValueError):
        found = json.loads(text)
    for name in ("error", "message", "detail"):
        found = found.get(name, found) if isinstance(found, dict) else found
    return found if isinstance(found, str) else text


def _read_answer(answer: dict[str, Any], result: Result) -> None:
    result.tokens = answer.get("usage", {}).get("completion_tokens")
    if "translations" in answer:
        result.answers = [one["text"] for one in answer["translations"]]
    elif "choices" in answer:
        result.answers = [one["text"] for one in answer["choices"]]
    else:
        found = answer["translatedText"]
        result.answers = [found] if isinstance(found, str) else found


async def _read_stream(response: aiohttp.ClientResponse, result: Result) -> None:
    pieces, last = [], result.started
    async for event in _events(response):
        if "error" in event:
            result.error = str(event["error"].get("code"))
            result.reason = _reason(json.dumps(event))
            return
        if event.get("usage"):
            result.tokens = event["usage"]["completion_tokens"]
        choices = event.get("choices")
        piece = choices[0]["text"] if choices else event.get("text", "")
        if piece:
            now = time.perf_counter()
            if result.first is None:
                result.first = now
            else:
                result.gaps.append(now - last)
            last = now
            pieces.append(piece)
    result.answers = ["".join(pieces)]


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for line in response.content:
        if line.startswith(b"data: {"):
            yield json.loads(line.removeprefix(b"data: "))


async def _watch(session: aiohttp.ClientSession, url: str, seen: list[Process]) -> None:
    """Reads a server's memory and CPU time, if it has Prometheus' usual metrics for them."""
    while True:
        try:
            async with session.get(f"{url}/metrics") as response:
                values = dict(PROCESS.findall(await response.text()))
        except (aiohttp.ClientError, TimeoutError):
            values = {}
        if len(values) == 2:
            memory, cpu = values["resident_memory_bytes"], values["cpu_seconds_total"]
            seen.append(Process(time.perf_counter(), float(memory), float(cpu)))
        await asyncio.sleep(SAMPLE_SECONDS)


def summarize(
    results: Sequence[Result], seconds: float, seen: Sequence[Process] = ()
) -> dict[str, Any]:
    """Returns rates, errors, and the percentiles of latencies in milliseconds.

    TTFT is the time to the first piece of text, ITL the time between two pieces, TPOT the mean of
    it in a request, and E2EL the time of a whole request. `cores` is the CPU time of the server
    per second, which shows whether other programs have used the machine.
    """
    good = [one for one in results if one.error is None]
    tokens = [one.tokens for one in good if one.tokens is not None]
    figures: dict[str, Any] = {
        "seconds": seconds,
        "requests": len(results),
        "errors": dict(Counter(one.error for one in results if one.error is not None)),
        "requests_per_second": len(good) / seconds,
        "texts_per_second": sum(len(one.answers) for one in good) / seconds,
        "tokens_per_second": sum(tokens) / seconds if tokens else None,
        "e2el_ms": percentiles([one.ended - one.started for one in good]),
    }
    if any(one.first is not None for one in good):
        streamed = [one for one in good if one.first is not None]
        figures |= {
            "ttft_ms": percentiles([(one.first or 0.0) - one.started for one in streamed]),
            "tpot_ms": percentiles([fmean(one.gaps) for one in streamed if one.gaps]),
            "itl_ms": percentiles([gap for one in streamed for gap in one.gaps]),
        }
    if seen:
        memory = [one.memory for one in seen]
        quarter = memory[len(memory) // 4]
        figures["memory_bytes"] = {"quarter": quarter, "end": memory[-1], "max": max(memory)}
    if len(seen) > 1 and good:
        cores = (seen[-1].cpu - seen[0].cpu) / (seen[-1].at - seen[0].at)
        figures |= {"cores": cores, "cpu_ms_per_request": 1e3 * cores * seconds / len(good)}
    return figures


def percentiles(seconds: Sequence[float]) -> dict[str, float] | None:
    """Returns mean and percentiles in milliseconds; None without values."""
    if not seconds:
        return None
    values = np.percentile(np.array(seconds) * 1e3, PERCENTILES).tolist()
    named = {f"p{p}": value for p, value in zip(PERCENTILES, values, strict=True)}
    return {"mean": 1e3 * fmean(seconds), **named}


def goodput(results: Sequence[Result], seconds: float, limit_ms: float) -> float:
    """Returns the requests per second that were answered within a limit."""
    in_time = [one for one in results if one.error is None]
    return sum(1e3 * (one.ended - one.started) <= limit_ms for one in in_time) / seconds


def at_equal_p95(rows: Sequence[dict[str, Any]], reference: str) -> list[dict[str, Any]]:
    """Returns the throughput of each batching at each p95 latency of `reference`, and their ratios.

    The highest throughput up to a p95 is interpolated between two loads. It is None if the p95 of
    each load of a batching is higher.
    """
    curves = {
        name: _throughputs([row for row in rows if row["batching"] == name])
        for name in dict.fromkeys(row["batching"] for row in rows)
    }
    found = []
    for p95, _ in curves[reference]:
        rates = {name: _rate_at(curve, p95) for name, curve in curves.items()}
        own = rates[reference]
        assert own is not None
        ratios = {
            name: None if rate is None else rate / own
            for name, rate in rates.items()
            if name != reference
        }
        found.append({"p95_ms": p95, "requests_per_second": rates, "ratio": ratios})
    return found


def _throughputs(rows: Sequence[dict[str, Any]]) -> list[tuple[float, float]]:
    """Returns (p95, requests per second) by p95, without loads that another load beats in both."""
    points = sorted(
        (row["e2el_ms"]["p95"], row["requests_per_second"]) for row in rows if row["e2el_ms"]
    )
    curve: list[tuple[float, float]] = []
    for p95, rate in points:
        if not curve or rate > curve[-1][1]:
            curve.append((p95, rate))
    return curve


def _rate_at(curve: Sequence[tuple[float, float]], p95: float) -> float | None:
    if not curve or p95 < curve[0][0]:
        return None
    latencies, rates = np.array(curve).T
    return float(np.interp(p95, latencies, rates))
