"""Documents of several lines or HTML: what is text is translated, the rest stays as it is."""

import html
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from writehead.config import DecodeConfig
from writehead.data.outputs import Output
from writehead.serving.models import Codes, Served
from writehead.serving.service import Service
from writehead.util.extras import requires

with requires("serve"):
    from fastapi import Request

MARKUP = re.compile(r"<(?:!--|[!?]|/?[a-z])", re.IGNORECASE)  # the start of a comment or a tag
QUOTE_OR_END = re.compile("[\"'>]")
OPAQUE = re.compile(r"<(script|style)\b", re.IGNORECASE)  # elements whose content is not text


class Part(NamedTuple):
    """A part of a document: text to translate, or what stays as it is."""

    content: str
    is_text: bool


async def translate_documents(
    http: Request,
    model: Served,
    documents: Sequence[str],
    options: DecodeConfig,
    codes: Codes,
    *,
    is_html: bool = False,
) -> list[list[str]]:
    """Returns the translations of each document, best first; lines are translated one by one."""
    service: Service = http.app.state.service
    service.check_texts(documents)
    parts = [parts_of(document, is_html) for document in documents]
    texts = [part.content for some in parts for part in some if part.is_text]
    left = iter((await service.decode(http, model, texts, options, codes=codes)).outputs)
    found = []
    for some in parts:
        outputs = [*islice(left, sum(part.is_text for part in some))]
        ranks = max((len(one.hypotheses) for one in outputs), default=1)
        found.append([join_parts(some, outputs, rank, is_html) for rank in range(ranks)])
    return found


def parts_of(document: str, is_html: bool = False) -> list[Part]:
    """Splits a document into lines, or the text of HTML, and what is between them."""
    return [*(_html(document) if is_html else _lines(document))]


def join_parts(
    parts: Sequence[Part], outputs: Sequence[Output], rank: int = 0, is_html: bool = False
) -> str:
    """Returns a document whose texts are replaced by their hypotheses of a rank."""
    left, joined = iter(outputs), []
    for part in parts:
        if not part.is_text:
            joined.append(part.content)
            continue
        hypotheses = next(left).hypotheses
        text = hypotheses[min(rank, len(hypotheses) - 1)].text
        joined.append(html.escape(text, quote=False) if is_html else text)
    return "".join(joined)


def _lines(text: str, is_html: bool = False) -> Iterator[Part]:
    """Yields lines without the spaces around them, and what is between lines."""
    for line in text.splitlines(keepends=True):
        content = line.strip()
        before, _, after = line.partition(content) if content else (line, "", "")
        # a model invents words for punctuation alone, which is what inline markup may leave
        is_text = any(map(str.isalnum, content))
        kept = html.escape(content, quote=False) if is_html and not is_text else content
        parts = (Part(before, False), Part(kept, is_text), Part(after, False))
        yield from (part for part in parts if part.content)


def _html(document: str) -> Iterator[Part]:
    """Yields markup and lines of text. Takes linear time; markup without an end is text."""
    start = 0
    while match := MARKUP.search(document, start):
        end = _end_of_markup(document, match)
        if end < 0:
            break
        yield from _lines(html.unescape(document[start : match.start()]), is_html=True)
        yield Part(document[match.start() : end], False)
        start = end
    yield from _lines(html.unescape(document[start:]), is_html=True)


def _end_of_markup(document: str, match: re.Match[str]) -> int:
    """Returns where a comment, a tag, or an element without text ends; -1 if nowhere."""
    if match[0] == "<!--":
        closing = document.find("-->", match.end())
        return closing + 3 if closing >= 0 else -1
    place = match.end()
    while found := QUOTE_OR_END.search(document, place):
        place = found.end()
        if found[0] == ">":
            break
        place = document.find(found[0], place) + 1
        if not place:
            return -1
    else:
        return -1
    opened = OPAQUE.match(document, match.start())
    if opened is None:
        return place
    close = re.compile(f"</{opened[1]}", re.IGNORECASE).search(document, place)
    return close.start() if close else len(document)
