"""DeepL's API: /v2/translate."""

from itertools import islice
from typing import Any

from writehead.config import DecodeConfig
from writehead.serving.bodies import body_schema, join_parts, parts_of, read_body
from writehead.serving.service import Service
from writehead.util.extras import requires

with requires("serve"):
    from fastapi import APIRouter, Request
    from pydantic import BaseModel

router = APIRouter(tags=["DeepL"])
SCHEME = "deepl-auth-key "


class DeeplBody(BaseModel):
    """The body of POST /v2/translate."""

    text: list[str]
    target_lang: str
    source_lang: str | None = None


class DeeplTranslation(BaseModel):
    """One translation."""

    detected_source_language: str
    text: str


class DeeplAnswer(BaseModel):
    """The translations, in the order of the texts."""

    translations: list[DeeplTranslation]


class DeeplError(BaseModel):
    """The reason why a request failed."""

    message: str


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": DeeplError} for status in (400, 401, 404, 413, 415, 422, 429, 500, 503, 504)
}


@router.post(
    "/v2/translate",
    response_model=DeeplAnswer,
    responses=ERRORS,
    openapi_extra=body_schema(DeeplBody),
)
async def translate(request: Request) -> dict[str, Any]:
    """Translates texts; lines of a text are translated one by one."""
    service: Service = request.app.state.service
    given = request.headers.get("authorization", "")
    service.check_key(given[len(SCHEME) :] if given.lower().startswith(SCHEME) else None)
    body = await read_body(request, DeeplBody, lists=("text",))
    model, codes = service.models.translator(source=body.source_lang, target=body.target_lang)
    parts = [parts_of(text) for text in body.text]
    texts = [part.content for some in parts for part in some if part.is_text]
    left = iter((await service.decode(request, model, texts, DecodeConfig(), codes=codes)).outputs)
    found = []
    for some in parts:
        outputs = [*islice(left, sum(part.is_text for part in some))]
        found.append(join_parts(some, outputs))
    source = model.languages[0] if model.languages else body.source_lang or ""
    return {
        "translations": [
            {"detected_source_language": source.upper(), "text": text} for text in found
        ]
    }
