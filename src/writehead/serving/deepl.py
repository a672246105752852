"""DeepL's API: /v2/translate, /v2/languages and /v2/usage."""

from typing import Annotated, Any, Literal

from writehead.config import DecodeConfig
from writehead.serving.bodies import TextList, body_schema, read_body
from writehead.serving.documents import translate_documents
from writehead.serving.errors import error_answers
from writehead.serving.keys import key_in_header
from writehead.serving.models import AUTO, language_name
from writehead.serving.service import Service
from writehead.util.extras import requires

with requires("serve"):
    from fastapi import APIRouter, Query, Request
    from pydantic import BaseModel

router = APIRouter(tags=["DeepL"])
SCHEME = "deepl-auth-key "
Side = Literal["source", "target"]
UNLIMITED = 10**12  # the limit that DeepL reports for accounts without one
# targets that DeepL knows only with a region; models ignore it
REGIONS = {
    "en": {"EN-GB": "English (British)", "EN-US": "English (American)"},
    "pt": {"PT-BR": "Portuguese (Brazilian)", "PT-PT": "Portuguese (European)"},
}


class DeeplBody(BaseModel):
    """The body of POST /v2/translate."""

    text: TextList
    target_lang: str
    source_lang: str | None = None


class DeeplTranslation(BaseModel):
    """One translation."""

    detected_source_language: str
    text: str
    billed_characters: int  # characters of the source; DeepL's client requires this field


class DeeplAnswer(BaseModel):
    """The translations, in the order of the texts."""

    translations: list[DeeplTranslation]


class LanguagesBody(BaseModel):
    """The body of /v2/languages."""

    type: Side = "source"


class DeeplLanguage(BaseModel):
    """A source or target language."""

    language: str
    name: str
    supports_formality: bool = False


class DeeplUsage(BaseModel):
    """Characters that were translated since the server started; the limit is never reached."""

    character_count: int
    character_limit: int = UNLIMITED


class DeeplError(BaseModel):
    """The reason why a request failed."""

    message: str


ERRORS = error_answers(DeeplError)


@router.post(
    "/v2/translate",
    response_model=DeeplAnswer,
    responses=ERRORS,
    openapi_extra=body_schema(DeeplBody),
)
async def translate(request: Request) -> dict[str, Any]:
    """Translates texts; lines of a text are translated one by one."""
    service: Service = request.app.state.service
    service.check_key(key_in_header(request, SCHEME))
    body = await read_body(request, DeeplBody, lists=("text",))
    model, codes, detected = await service.translator(
        request, body.text, body.source_lang or AUTO, body.target_lang
    )
    found = await translate_documents(request, model, body.text, DecodeConfig(), codes)
    service.deepl_characters += sum(map(len, body.text))
    known = model.languages[0] if model.languages else body.source_lang or ""
    source = known if detected is None else detected.language
    return {
        "translations": [
            {
                "detected_source_language": source.upper(),
                "text": texts[0],
                "billed_characters": len(text),
            }
            for text, texts in zip(body.text, found, strict=True)
        ]
    }


@router.get("/v2/languages", response_model=list[DeeplLanguage], responses=ERRORS)
@router.post("/v2/languages", response_model=list[DeeplLanguage], responses=ERRORS)
async def languages(
    request: Request, side: Annotated[Side, Query(alias="type")] = "source"
) -> list[dict[str, str]]:
    """Lists the source or target languages of all models; the body may give the type, too."""
    service: Service = request.app.state.service
    service.check_key(key_in_header(request, SCHEME))
    if await request.body():  # DeepL's client sends a form even with GET
        side = (await read_body(request, LanguagesBody)).type
    lists = [one.language_lists()[side == "target"] for one in service.models if one.translates]
    names: dict[str, str] = {}
    for code in sorted({code for codes in lists for code in codes}):
        regions = REGIONS.get(code) if side == "target" else None
        names |= regions or {code.upper(): language_name(code)}
    return [{"language": code, "name": name} for code, name in names.items()]


@router.get("/v2/usage", response_model=DeeplUsage, responses=ERRORS)
@router.post("/v2/usage", response_model=DeeplUsage, responses=ERRORS)
async def usage(request: Request) -> dict[str, int]:
    """Returns how many characters were translated by this API since the server started."""
    service: Service = request.app.state.service
    service.check_key(key_in_header(request, SCHEME))
    return {"character_count": service.deepl_characters}
