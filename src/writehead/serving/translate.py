"""Our own API: /v1/translate has every option of `DecodeConfig`, n-best lists and streams."""

import dataclasses
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any

from writehead.config import DecodeConfig
from writehead.data.outputs import Output
from writehead.errors import ConfigError
from writehead.serving.bodies import Texts
from writehead.serving.errors import ApiError, error_answers
from writehead.serving.events import STREAM, ServerSentEvents
from writehead.serving.keys import Key
from writehead.serving.service import Service, Streaming, facts_of
from writehead.serving.settings import BEAM_LIMIT
from writehead.util.extras import requires

with requires("serve"):
    from fastapi import APIRouter, Request
    from fastapi.responses import JSONResponse
    from pydantic import BaseModel, ConfigDict, Field

router = APIRouter(tags=["writehead"])
INT32 = 2**31 - 1
Count = Annotated[int, Field(ge=1, le=INT32)]


class Search(BaseModel):
    """The options of a search, as in `DecodeConfig`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    beam: Annotated[int, Field(ge=1, le=BEAM_LIMIT)] | None = None
    alpha: Annotated[float, Field(ge=-10, le=10)] = 0.6
    n_best: Annotated[int, Field(ge=1, le=BEAM_LIMIT)] = 1
    max_length: Count | None = None
    min_length: Annotated[int, Field(ge=0, le=INT32)] = 0
    temperature: Annotated[float, Field(gt=0)] | None = None
    top_k: Count | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=1e30)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**62)] = 0


class TranslationBody(Search):
    """The body of POST /v1/translate; a model is chosen by name, or by languages."""

    text: Texts = Field(description="Text, or a list of texts.")
    model: str | None = None
    source: str | None = None
    target: str | None = None
    prefix: Texts | None = Field(None, description="The start of each translation.")
    stream: bool = Field(False, description="Send pieces of text as server-sent events.")


class Scored(BaseModel):
    """A translation, its score and its log probability."""

    text: str
    score: float
    log_probability: float
    finished: bool


class Translation(BaseModel):
    """The translations of one text, best first."""

    text: str
    hypotheses: list[Scored]
    pieces: int


class TokenUsage(BaseModel):
    """Tokens of the texts and of all hypotheses."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class TranslationAnswer(BaseModel):
    """The translations, in the order of the texts."""

    id: str
    model: str
    translations: list[Translation]
    usage: TokenUsage


class Fault(BaseModel):
    """What is wrong with a request."""

    message: str
    type: str
    param: str | None
    code: int


class FaultAnswer(BaseModel):
    """The reason why a request failed, as OpenAI writes it."""

    error: Fault


ERRORS = error_answers(FaultAnswer)


@router.post("/v1/translate", response_model=TranslationAnswer, responses={200: STREAM, **ERRORS})
async def translate(request: Request, body: TranslationBody, _key: Key) -> Any:
    """Translates texts with any search; with `stream`, sends text as it is decoded."""
    service: Service = request.app.state.service
    names = {field.name for field in dataclasses.fields(DecodeConfig)}
    try:
        options = DecodeConfig(**{name: getattr(body, name) for name in names})
        if body.stream and options.beam is None:
            options = options.with_default_beam(1)
    except ConfigError as error:
        raise ApiError(422, str(error)) from error
    texts = [body.text] if isinstance(body.text, str) else body.text
    model, codes, _ = await service.translator(request, texts, body.source, body.target, body.model)
    prefixes = [body.prefix] * len(texts) if isinstance(body.prefix, str) else body.prefix
    if body.stream:
        if options.width > 1:
            raise ApiError(422, "beam search cannot stream text; use beam=1")
        stream = await service.stream(
            request, model, texts, options, prefixes=prefixes, codes=codes
        )
        return ServerSentEvents(request.url.path, _events(stream))
    decoded = await service.decode(request, model, texts, options, prefixes=prefixes, codes=codes)
    answer = {
        "id": facts_of(request).id,
        "model": model.name,
        "translations": [_translation(output) for output in decoded.outputs],
        "usage": usage(decoded.prompt_tokens, decoded.tokens),
    }
    return JSONResponse(answer)  # without the validation of response_model, which takes time


def usage(prompt_tokens: int, tokens: int) -> dict[str, int]:
    """Returns the tokens of a call."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": tokens,
        "total_tokens": prompt_tokens + tokens,
    }


class Joined:
    """The growing pieces of a long text as one text, in order, with a space between pieces."""

    def __init__(self, count: int) -> None:
        self._held, self._ended = [""] * count, [False] * count
        self._current = 0  # the piece whose text is returned; that of later pieces is held
        self._space, self._has_text = "", False

    def add(self, place: int, text: str, is_end: bool) -> str:
        """Appends text to a piece; returns the text that follows what was returned before."""
        self._held[place] += text
        self._ended[place] = is_end
        found = ""
        while self._current < len(self._held):
            new, self._held[self._current] = self._held[self._current], ""
            if new:
                found, self._space, self._has_text = found + self._space + new, "", True
            if not self._ended[self._current]:
                break
            self._current += 1
            self._space = " " if self._has_text else ""
        return found


async def _events(stream: Streaming) -> AsyncGenerator[dict[str, Any], None]:
    """Yields new text of each translation, then the whole translations."""
    places = [(i, j) for i, line in enumerate(stream.lines) for j in range(len(line))]
    joined = [Joined(len(line)) for line in stream.lines]
    async with aclosing(aiter(stream)) as pieces:
        async for piece in pieces:
            i, j = places[piece.place]
            if text := joined[i].add(j, piece.text, piece.token is None):
                yield {"index": i, "text": text}
    outputs = stream.model.engine.outputs(stream.lines)
    yield {
        "id": stream.facts.id,
        "model": stream.model.name,
        "translations": [_translation(output) for output in outputs],
        "usage": usage(stream.facts.prompt_tokens, stream.facts.tokens),
    }


def _translation(output: Output) -> dict[str, Any]:
    hypotheses = [one._asdict() for one in output.hypotheses]
    return {"text": output.text, "hypotheses": hypotheses, "pieces": output.pieces}
