"""Reads JSON from untrusted files: limits its bytes, depth and digits, and checks its structure."""

import json
import math
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from writehead.errors import WriteheadError, shown

MAX_BYTES = 16 << 20
MAX_DEPTH = 64
MAX_DIGITS = 40  # per number: enough for any count of operations, and within the range of a float
WORDS = {dict: "an object", list: "a list", str: "text", float: "a number", int: "an integer"}

Shape = Any  # see `check_shape`


class JsonError(ValueError):
    """JSON that exceeds a limit or has the wrong shape; the message follows a file name."""


def read_json(
    path: Path,
    shape: Shape,
    error: type[WriteheadError],
    advice: str = "",
    *,
    max_bytes: int = MAX_BYTES,
    allow_nan: bool = False,
) -> Any:
    """Reads a JSON file and checks its shape; raises `error`, whose message ends with `advice`."""
    advice = f"; {advice}" if advice else ""
    try:
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
        if len(content) > max_bytes:
            raise JsonError(f"has more than {max_bytes:,} bytes")
        value = parse_json(content.decode(), allow_nan=allow_nan)
        check_shape(value, shape)
    except OSError as fault:
        raise error(f"{path} cannot be read: {fault.strerror}{advice}") from fault
    except ValueError as fault:
        problem = "" if isinstance(fault, JsonError) else "is not JSON: "
        raise error(f"{path} {problem}{fault}{advice}") from fault
    return value


def parse_json(text: str, *, allow_nan: bool = False) -> Any:
    """Parses JSON; raises JSONDecodeError, or JsonError if the text exceeds a limit.

    NaN and infinity, which Python writes but JSON does not have, are errors unless `allow_nan`.
    """

    def number(kind: type[int] | type[float], digits: str) -> float:
        if len(digits) > MAX_DIGITS:
            raise JsonError(f"has a number of {len(digits):,} digits, more than {MAX_DIGITS}")
        value = kind(digits)
        if not (allow_nan or math.isfinite(value)):
            raise JsonError(f"contains {digits}, which is not a finite number")
        return value

    integer, real = partial(number, int), partial(number, float)
    try:
        value = json.loads(text, parse_int=integer, parse_float=real, parse_constant=real)
        too_deep = _depth(value) > MAX_DEPTH
    except RecursionError:
        too_deep = True
    if too_deep:
        raise JsonError(f"is nested more than {MAX_DEPTH} levels deep")
    return value


def _depth(value: object) -> int:
    if not isinstance(value, dict | list):
        return 0
    children = value.values() if isinstance(value, dict) else value
    return 1 + max(map(_depth, children), default=0)


def check_shape(value: object, shape: Shape, place: str = "") -> None:
    """Raises JsonError unless a JSON value has the given shape.

    A shape is one of: a type, where float allows any number and object allows any value; a range
    that contains the integer; None, for null; a tuple of alternative shapes; [shape], for a list;
    {str: shape}, for an object with any names; or {"name": shape, "other?": shape}, for an object
    with at least these names, of which "other" is optional.
    """
    for alternative in shape if isinstance(shape, tuple) else ():
        with suppress(JsonError):
            check_shape(value, alternative)
            return
    if isinstance(shape, list) and isinstance(value, list):
        for i, inner in enumerate(value):
            check_shape(inner, shape[0], f"{place}[{i}]")
    elif isinstance(shape, dict) and isinstance(value, dict):
        fields = dict.fromkeys(value, shape[str]) if str in shape else shape
        for field, inner_shape in fields.items():
            name = field if field in value else field.removesuffix("?")
            inside = ".".join(filter(None, (place, shown(name).strip("'"))))
            if name in value:
                check_shape(value[name], inner_shape, inside)
            elif not field.endswith("?"):
                raise JsonError(f"lacks {inside}")
    elif not _fits(value, shape):
        problem = f"{place} is {shown(value)}" if place else f"contains {shown(value)}"
        raise JsonError(f"is damaged: {problem}, which should be {_words(shape)}")


def _fits(value: object, shape: Shape) -> bool:
    """Returns whether a value has a shape that is a type, a range or None."""
    if value is None or isinstance(value, bool):
        return shape in (object, None if value is None else bool)
    if isinstance(shape, range):
        return isinstance(value, int) and value in shape
    return isinstance(shape, type) and isinstance(value, (int, float) if shape is float else shape)


def _words(shape: Shape) -> str:
    if isinstance(shape, tuple):
        return " or ".join(map(_words, shape))
    if isinstance(shape, range):
        return f"an integer from {shape.start} to {shape.stop - 1}"
    if shape is None:
        return "null"
    return WORDS.get(shape if isinstance(shape, type) else type(shape), "true or false")
