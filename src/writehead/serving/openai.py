"""OpenAI's API: /v1/completions of language models, and /v1/models."""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from itertools import accumulate
from typing import Annotated, Any, Literal, NamedTuple

import torch

from writehead import cost
from writehead.config import DecodeConfig
from writehead.data.continuations import StreamedText
from writehead.engine import Engine
from writehead.engine.engine import Line
from writehead.errors import ConfigError
from writehead.model import LanguageModel
from writehead.serving.bodies import Texts
from writehead.serving.errors import ApiError
from writehead.serving.events import STREAM, ServerSentEvents
from writehead.serving.keys import Key
from writehead.serving.models import Served
from writehead.serving.service import Decoded, Service, Streaming, facts_of
from writehead.serving.stop import StopText
from writehead.serving.translate import ERRORS, INT32, TokenUsage, usage
from writehead.util.extras import requires

with requires("serve"):
    from fastapi import APIRouter, Request
    from pydantic import BaseModel, ConfigDict, Field

router = APIRouter(tags=["OpenAI"])
STARTED = int(time.time())
MAX_SAMPLES = 128
Zero = Annotated[float, Field(ge=0, le=0)]


class CompletionBody(BaseModel):
    """The body of POST /v1/completions; top_k, min_p and others are named as in vLLM."""

    model_config = ConfigDict(strict=True)

    model: str
    prompt: Texts
    max_tokens: Annotated[int, Field(ge=1, le=INT32)] | None = 16
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
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None
    frequency_penalty: Zero | None = None
    presence_penalty: Zero | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None


class TokenLogprobs(BaseModel):
    """The tokens of a completion, and their log probabilities."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
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
    served, samples = service.models.writer(body.model), body.n or 1
    options = _options(body, served.engine.model.config.target_positions)
    if body.stream and body.logprobs is not None:
        raise ApiError(422, "logprobs are not streamed; leave out stream or logprobs")
    prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    head = {
        "id": f"cmpl-{facts_of(request).id}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": served.name,
    }
    if body.stream or any(stops):
        stream = await service.stream(request, served, prompts, options, samples=samples)
        echoes = _echoes(body, stream.lines, prompts)
        texts = [StopText(stops) for _ in echoes]
        chunks = _chunks(stream, texts, echoes)
        if body.stream:
            wants_usage = bool((body.stream_options or {}).get("include_usage"))
            return ServerSentEvents(request.url.path, _events(chunks, head, stream, wants_usage))
        completed = await service.guarded(request, _collect(stream, chunks, texts))
    else:
        decoded = await service.decode(request, served, prompts, options, samples=samples)
        echoes = _echoes(body, decoded.lines, prompts)
        completed = _completed(decoded, echoes)
    choices = []
    for i, (one, echo) in enumerate(zip(completed, echoes, strict=True)):
        scored = None
        if body.logprobs is not None:
            work = partial(_logprobs, served.engine, one.prompt, one.tokens, body.logprobs)
            scored = await service.between_steps(request, work)
            # not between steps, which would wait for it
            pieces = asyncio.to_thread(_pieces, served.engine, one.prompt, one.tokens)
            scored["tokens"] = await service.guarded(request, pieces)
            ends = accumulate(map(len, scored["tokens"]), initial=len(echo))
            scored["text_offset"] = [*ends][:-1]
        choices.append(
            {"index": i, "text": one.text, "logprobs": scored, "finish_reason": one.reason}
        )
    facts = facts_of(request)
    return {**head, "choices": choices, "usage": usage(facts.prompt_tokens, facts.tokens)}


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
    stream: Streaming,
    chunks: AsyncGenerator[tuple[int, str, str | None], None],
    texts: Sequence[StopText],
) -> list[Completed]:
    """Returns the completions of a stream that ends at stop strings."""
    whole = [""] * len(texts)
    reasons: list[str | None] = [None] * len(texts)
    async with aclosing(chunks) as source:
        async for i, text, reason in source:
            whole[i], reasons[i] = whole[i] + text, reason
    return [
        Completed(text, reason, [*map(int, request.tokens)], own.tokens)
        for text, reason, request, own in zip(
            whole, reasons, stream.job.requests, texts, strict=True
        )
    ]


def _options(body: CompletionBody, positions: int) -> DecodeConfig:
    """Returns the search of a request; a text ends at the last position of the model."""
    samples = bool(body.temperature) or body.temperature is None
    if not samples and (body.n or 1) > 1:
        raise ApiError(422, "all n completions would be the same; set a temperature")
    sampling: dict[str, Any] = {}
    if samples:
        top_k = body.top_k if body.top_k and body.top_k > 0 else None
        top_p = body.top_p if body.top_p != 1.0 else None
        sampling = {"top_k": top_k, "top_p": top_p, "min_p": body.min_p}
        sampling["temperature"] = 1.0 if body.temperature is None else body.temperature
    try:
        return DecodeConfig(
            max_length=min(body.max_tokens or positions, positions),
            min_length=min(body.min_tokens, body.max_tokens or positions, positions),
            repetition_penalty=body.repetition_penalty,
            seed=secrets.randbits(31) if body.seed is None else body.seed,
            **sampling,
        )
    except ConfigError as error:
        raise ApiError(422, str(error)) from error


async def _chunks(
    stream: Streaming, texts: Sequence[StopText], echoes: Sequence[str]
) -> AsyncGenerator[tuple[int, str, str | None], None]:
    """Yields (choice, text, finish reason); ends when every choice has ended."""
    for i, echo in enumerate(echoes):
        if echo:
            yield i, echo, None
    requests = stream.job.requests
    async with aclosing(aiter(stream)) as pieces:
        async for piece in pieces:
            text = texts[piece.place]
            if text.is_over:
                continue
            is_last = piece.token is None
            new = text.add(piece.text, piece.token)
            if is_last and not text.is_over:
                new += text.rest()
            reason = "stop" if text.is_over else None
            if is_last and reason is None:
                finished = requests[piece.place].hypotheses[0].finished
                reason = "stop" if finished else "length"
            if new or reason:
                yield piece.place, new, reason
            if all(one.is_over for one in texts):
                stream.is_enough = True
                return


async def _events(
    chunks: AsyncGenerator[tuple[int, str, str | None], None],
    head: dict[str, Any],
    stream: Streaming,
    wants_usage: bool,
) -> AsyncGenerator[dict[str, Any], None]:
    async with aclosing(chunks) as source:
        async for index, text, reason in source:
            choice = {"index": index, "text": text, "logprobs": None, "finish_reason": reason}
            yield {**head, "choices": [choice]}
    if wants_usage:
        counted = usage(stream.facts.prompt_tokens, stream.facts.tokens)
        yield {**head, "choices": [], "usage": counted}


@torch.no_grad()
def _logprobs(engine: Engine, prompt: list[int], tokens: list[int], top: int) -> dict[str, Any]:
    """Returns the log probabilities of tokens after a prompt, from one forward pass."""
    assert isinstance(engine.model, LanguageModel)
    if not tokens:
        return {"token_logprobs": [], "top_logprobs": [] if top else None}
    ids = torch.tensor([[*prompt, *tokens]], device=engine.model.device)
    logits = engine.model(ids[:, :-1])[0, len(prompt) - 1 :, : engine.tokenizer.vocab_size]
    log_p = logits.float().log_softmax(dim=1)
    best = log_p.topk(min(top, log_p.shape[1]), dim=1) if top else None
    tops = None
    if best is not None:
        tops = [
            {engine.tokenizer.decode([i]): p for p, i in zip(*row, strict=True)}
            for row in zip(best.values.tolist(), best.indices.tolist(), strict=True)
        ]
    chosen = log_p.gather(1, ids[0, len(prompt) :].unsqueeze(1)).squeeze(1)
    return {"token_logprobs": chosen.tolist(), "top_logprobs": tops}


def _pieces(engine: Engine, prompt: list[int], tokens: list[int]) -> list[str]:
    """Returns the text of each token after a prompt; of an incomplete character, it is empty."""
    text = StreamedText(engine.tokenizer, prompt)
    pieces = [text.add([token]) for token in tokens]
    return [*pieces[:-1], pieces[-1] + text.rest()] if pieces else []


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
