"""OpenAI's API: /v1/completions of language models, and /v1/models."""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

from writehead import cost
from writehead.config import DecodeConfig
from writehead.engine import Engine
from writehead.engine.engine import Line
from writehead.errors import ConfigError
from writehead.serving.bodies import Texts
from writehead.serving.errors import ApiError
from writehead.serving.events import STREAM, ServerSentEvents
from writehead.serving.keys import Key
from writehead.serving.logprobs import Listing, list_whole, score_whole
from writehead.serving.models import Served
from writehead.serving.service import Decoded, Service, Streaming, facts_of
from writehead.serving.stop import StopText
from writehead.serving.translate import ERRORS, INT32, TokenUsage, usage
from writehead.serving.validation import Unsupported
from writehead.util.extras import requires

with requires("serve"):
    from fastapi import APIRouter, Request
    from pydantic import BaseModel, ConfigDict, Field

router = APIRouter(tags=["OpenAI"])
STARTED = int(time.time())
MAX_SAMPLES = 128
Zero = Annotated[Annotated[float, Field(ge=0, le=0)] | None, Unsupported]


class CompletionBody(BaseModel):
    """The body of POST /v1/completions; top_k, min_p and others are named as in vLLM."""

    model_config = ConfigDict(strict=True)

    model: str
    prompt: Texts
    max_tokens: Annotated[int, Field(ge=0, le=INT32)] | None = 16
    min_tokens: Annotated[int, Field(ge=0, le=INT32)] = 0
    temperature: Annotated[float, Field(ge=0, le=100)] | None = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] | None = 1.0
    top_k: Annotated[int, Field(ge=-1, le=INT32)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=1e30)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] | None = 1
    seed: Annotated[int, Field(ge=0, lt=2**62)] | None = None
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    stream: bool | None = False
    stream_options: dict[str, bool | None] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = False
    user: str | None = None
    # accepted with the value that changes nothing
    best_of: Annotated[Literal[1] | None, Unsupported] = None
    suffix: Annotated[Literal[""] | None, Unsupported] = None
    frequency_penalty: Zero = None
    presence_penalty: Zero = None
    logit_bias: Annotated[Annotated[dict[str, float], Field(max_length=0)] | None, Unsupported] = (
        None
    )


class TokenLogprobs(BaseModel):
    """The tokens of a completion, and their log probabilities; null for the first of a prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class Choice(BaseModel):
    """One completion."""

    index: int
    text: str
    logprobs: TokenLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class CompletionAnswer(BaseModel):
    """All completions of a request."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[Choice]
    usage: TokenUsage


class ModelAnswer(BaseModel):
    """A model, with what distinguishes ours."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    task: str
    languages: list[str] | None
    attention: str
    parameters: int
    kv_bytes_per_token: int
    source_positions: int
    target_positions: int


class ModelList(BaseModel):
    """All models of the server."""

    object: Literal["list"]
    data: list[ModelAnswer]


@router.get("/v1/models", response_model=ModelList, responses={401: ERRORS[401]})
async def models(request: Request, _: Key) -> dict[str, Any]:
    """Lists the models."""
    service: Service = request.app.state.service
    return {"object": "list", "data": [_model(one) for one in service.models]}


@router.get(
    "/v1/models/{name:path}",
    response_model=ModelAnswer,
    responses={status: ERRORS[status] for status in (401, 404, 422)},
)
async def model(request: Request, name: str, _: Key) -> dict[str, Any]:
    """Returns one model."""
    service: Service = request.app.state.service
    return _model(service.models.named(name))


@router.post("/v1/completions", response_model=CompletionAnswer, responses={200: STREAM, **ERRORS})
async def completions(request: Request, body: CompletionBody, _: Key) -> Any:
    """Continues prompts; with `stream`, sends text as it is decoded."""
    service: Service = request.app.state.service
    _check(body)
    served, samples = service.models.writer(body.model), body.n or 1
    options = _options(body, served.engine.model.config.target_positions)
    prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    head = {
        "id": f"cmpl-{facts_of(request).id}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": served.name,
    }
    if body.max_tokens == 0:
        lines = await service.requests(request, served, prompts, options, samples=samples)
        echoes = _echoes(body, lines, prompts)
        completed = _prompts_only(lines, echoes)
    elif body.stream or any(stops):
        scores = body.logprobs if body.stream else None  # otherwise, one forward pass is faster
        stream = await service.stream(
            request, served, prompts, options, samples=samples, logprobs=scores
        )
        echoes = _echoes(body, stream.lines, prompts)
        texts = [StopText(stops) for _ in echoes]
        lists = None if scores is None else _listings(stream, scores)
        chunks = _chunks(stream, texts, echoes, lists)
        if body.stream:
            events = _events(chunks, head, stream, _wants_usage(body))
            return ServerSentEvents(request.url.path, events)
        completed = await service.guarded(request, _collect(stream, chunks, texts))
    else:
        decoded = await service.decode(request, served, prompts, options, samples=samples)
        echoes = _echoes(body, decoded.lines, prompts)
        completed = _completed(decoded, echoes)
    choices = []
    for i, (one, echo) in enumerate(zip(completed, echoes, strict=True)):
        scored = None
        if body.logprobs is not None:
            echoed = echo if body.echo else None
            scored = await _listing(service, request, served.engine, one, echoed, body.logprobs)
        choices.append(
            {"index": i, "text": one.text, "logprobs": scored, "finish_reason": one.reason}
        )
    facts = facts_of(request)
    return {**head, "choices": choices, "usage": usage(facts.prompt_tokens, facts.tokens)}


class Chunk(NamedTuple):
    """New text of a choice; the last chunk of a choice has its finish reason."""

    place: int
    text: str
    reason: str | None = None
    logprobs: dict[str, Any] | None = None


class Completed(NamedTuple):
    """A completion, with the tokens of its prompt and its own."""

    text: str
    reason: str | None
    prompt: list[int]
    tokens: list[int]


def _echoes(body: CompletionBody, lines: Sequence[Line], prompts: Sequence[str]) -> list[str]:
    """Returns how the text of each choice starts: with its prompt, or empty."""
    pairs = zip(prompts, lines, strict=True)
    return [prompt if body.echo else "" for prompt, line in pairs for _ in line]


def _completed(decoded: Decoded, echoes: Sequence[str]) -> list[Completed]:
    """Returns the completions of requests that were decoded to their end."""
    requests = [request for line in decoded.lines for request in line]
    texts = [one.text for output in decoded.outputs for one in output.hypotheses]
    return [
        Completed(
            echo + text,
            "stop" if request.hypotheses[0].finished else "length",
            [*map(int, request.tokens)],
            [*map(int, request.hypotheses[0].tokens)],
        )
        for request, text, echo in zip(requests, texts, echoes, strict=True)
    ]


async def _collect(
    stream: Streaming, chunks: AsyncGenerator[Chunk, None], texts: Sequence[StopText]
) -> list[Completed]:
    """Returns the completions of a stream that ends at stop strings."""
    whole = [""] * len(texts)
    reasons: list[str | None] = [None] * len(texts)
    async with aclosing(chunks) as source:
        async for chunk in source:
            whole[chunk.place] += chunk.text
            reasons[chunk.place] = chunk.reason
    return [
        Completed(text, reason, [*map(int, request.tokens)], own.tokens)
        for text, reason, request, own in zip(
            whole, reasons, stream.job.requests, texts, strict=True
        )
    ]


def _prompts_only(lines: Sequence[Line], echoes: Sequence[str]) -> list[Completed]:
    """Returns completions without tokens of their own, as for `max_tokens=0`."""
    requests = [request for line in lines for request in line]
    pairs = zip(echoes, requests, strict=True)
    return [Completed(echo, "length", [*map(int, one.tokens)], []) for echo, one in pairs]


def _listings(stream: Streaming, top: int) -> list[Listing]:
    """Returns the lists of log probabilities of a stream, which are empty at first."""
    tokenizer = stream.model.engine.tokenizer
    prompts = ([*map(int, request.tokens)] for request in stream.job.requests)
    return [Listing(tokenizer, prompt, 0, top) for prompt in prompts]


async def _listing(
    service: Service, request: Request, engine: Engine, one: Completed, echo: str | None, top: int
) -> dict[str, Any]:
    """Returns the log probabilities of a whole completion, with `echo` also of its prompt."""
    # the first token of a prompt has no probability
    ids, unscored = [*one.prompt, *one.tokens], len(one.prompt) if echo is None else 1
    work = partial(score_whole, engine, ids[:unscored], ids[unscored:], top)
    scores = await service.between_steps(request, work)
    # not between steps, which would wait for it
    listed = asyncio.to_thread(list_whole, engine, one.prompt, one.tokens, scores, top, echo)
    return await service.guarded(request, listed)


def _check(body: CompletionBody) -> None:
    """Raises 422 if options exclude each other."""
    if body.max_tokens == 0 and (body.stream or not body.echo):
        raise ApiError(422, "max_tokens=0 requires echo and cannot be streamed")
    if body.stream and body.echo and body.logprobs is not None:
        raise ApiError(
            422, "the logprobs of a prompt cannot be streamed; omit stream, echo or logprobs"
        )


def _options(body: CompletionBody, positions: int) -> DecodeConfig:
    """Returns the search of a request; a text ends at the last position of the model."""
    samples = bool(body.temperature) or body.temperature is None
    if not samples and (body.n or 1) > 1:
        raise ApiError(422, "all n completions would be the same; set a temperature")
    sampling: dict[str, Any] = {}
    most = positions if body.max_tokens is None else min(body.max_tokens, positions)
    if samples:
        top_k = body.top_k if body.top_k and body.top_k > 0 else None
        top_p = body.top_p if body.top_p != 1.0 else None
        sampling = {"top_k": top_k, "top_p": top_p, "min_p": body.min_p}
        sampling["temperature"] = 1.0 if body.temperature is None else body.temperature
    try:
        return DecodeConfig(
            max_length=max(most, 1),
            min_length=min(body.min_tokens, most),
            repetition_penalty=body.repetition_penalty,
            seed=secrets.randbits(31) if body.seed is None else body.seed,
            **sampling,
        )
    except ConfigError as error:
        raise ApiError(422, str(error)) from error


async def _chunks(
    stream: Streaming,
    texts: Sequence[StopText],
    echoes: Sequence[str],
    lists: Sequence[Listing] | None = None,
) -> AsyncGenerator[Chunk, None]:
    """Yields new text of the choices; ends when every choice has ended.

    A chunk has the log probabilities of all tokens since the previous chunk of the choice.
    """
    for i, echo in enumerate(echoes):
        if echo:
            yield Chunk(i, echo)
    requests = stream.job.requests
    async with aclosing(aiter(stream)) as pieces:
        async for piece in pieces:
            place, text = piece.place, texts[piece.place]
            if text.is_over:
                continue
            is_last = piece.token is None
            new = text.add(piece.text, piece.token)
            if is_last and not text.is_over:
                new += text.rest()
            reason = "stop" if text.is_over else None
            if is_last and reason is None:
                reason = "stop" if requests[place].hypotheses[0].finished else "length"
            if lists is not None and piece.token is not None:
                lists[place].add(piece.text, piece.token, piece.scored)
            elif lists is not None:
                lists[place].end(piece.text)
            if new or reason:
                yield Chunk(place, new, reason, None if lists is None else lists[place].take())
            if all(one.is_over for one in texts):
                stream.is_enough = True
                return


async def _events(
    chunks: AsyncGenerator[Chunk, None],
    head: dict[str, Any],
    stream: Streaming,
    wants_usage: bool,
) -> AsyncGenerator[dict[str, Any], None]:
    """Yields the objects to send; with usage, it is null in all but the last."""
    if wants_usage:
        head = {**head, "usage": None}
    async with aclosing(chunks) as source:
        async for place, text, reason, logprobs in source:
            choice = {"index": place, "text": text, "logprobs": logprobs, "finish_reason": reason}
            yield {**head, "choices": [choice]}
    if wants_usage:
        counted = usage(stream.facts.prompt_tokens, stream.facts.tokens)
        yield {**head, "choices": [], "usage": counted}


def _wants_usage(body: CompletionBody) -> bool:
    return bool((body.stream_options or {}).get("include_usage"))


def _model(one: Served) -> dict[str, Any]:
    config = one.engine.model.config
    setting = cost.Setting(1, 1, 1, element=one.engine.model.dtype.itemsize)
    return {
        "id": one.name,
        "object": "model",
        "created": STARTED,
        "owned_by": "writehead",
        "task": config.task,
        "languages": one.languages,
        "attention": config.kind,
        "parameters": sum(cost.parameters(config).values()),
        "kv_bytes_per_token": cost.kv_bytes(config, setting)["target_token"],
        "source_positions": config.source_positions,
        "target_positions": config.target_positions,
    }
