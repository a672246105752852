"""Reads JSON from untrusted files: limits its bytes, depth and digits, and checks its structure."""

import json
import math
from pathlib import Path
from typing import Any

from writehead.errors import WriteheadError, shown

MAX_BYTES = 16 << 20
MAX_DEPTH = 64
MAX_DIGITS = 40  # per number: enough for any count of operations, and within the range of a float
TOO_DEEP = f"is nested more than {MAX_DEPTH} levels deep"
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
    except JsonError as fault:
        raise error(f"{path} {fault}{advice}") from fault
    except ValueError as fault:
        raise error(f"{path} is not JSON: {fault}{advice}") from fault
    return value


def parse_json(text: str, *, allow_nan: bool = False) -> Any:
    """Parses JSON; raises JSONDecodeError, or JsonError if the text exceeds a limit.

    NaN and infinity, which Python writes but JSON does not have, are errors unless `allow_nan`.
    """

    def integer(digits: str) -> int:
        _check_digits(digits)
        return int(digits)

    def number(digits: str) -> float:
        _check_digits(digits)
        value = float(digits)
        return value if math.isfinite(value) else constant(digits)

    def constant(name: str) -> float:
        if not allow_nan:
            raise JsonError(f"contains {shown(name, 30)}, which is not a finite number")
        return float(name)

    try:
        value = json.loads(text, parse_int=integer, parse_float=number, parse_constant=constant)
    except RecursionError as error:
        raise JsonError(TOO_DEEP) from error
    level, depth = [value], 0
    while level := [inner for outer in level for inner in _children(outer)]:
        depth += 1
        if depth > MAX_DEPTH:
            raise JsonError(TOO_DEEP)
    return value


def check_shape(value: object, shape: Shape, place: str = "") -> None:
    """Raises JsonError unless a JSON value has the given shape.

    A shape is one of: a type, where float allows any number and object allows any value; a range
    that contains the integer; None, for null; a tuple of alternative shapes; [shape], for a list;
    {str: shape}, for an object with any names; or {"name": shape, "other?": shape}, for an object
    with at least these names, of which "other" is optional.
    """
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
        words = f"{place} is {shown(value)}" if place else f"holds {shown(value)}"
        raise JsonError(f"is damaged: {words}, which should be {_words(shape)}")


def _fits(value: object, shape: Shape) -> bool:
    """Whether a value has a shape that is a type, a range, None or a tuple of alternatives."""
    if isinstance(shape, tuple):
        return any(_has_shape(value, one) for one in shape)
    if value is None or isinstance(value, bool):
        return shape in (object, None if value is None else bool)
    if isinstance(shape, range):
        return isinstance(value, int) and value in shape
    return isinstance(shape, type) and isinstance(value, (int, float) if shape is float else shape)


def _has_shape(value: object, shape: Shape) -> bool:
    try:
        check_shape(value, shape)
    except JsonError:
        return False
    return True


def _words(shape: Shape) -> str:
    if isinstance(shape, tuple):
        return " or ".join(map(_words, shape))
    if isinstance(shape, range):
        return f"an integer from {shape.start} to {shape.stop - 1}"
    if shape is None:
        return "null"
    return WORDS.get(shape if isinstance(shape, type) else type(shape), "true or false")


def _children(value: object) -> Any:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _check_digits(digits: str) -> None:
    if len(digits) > MAX_DIGITS:
        raise JsonError(f"has a number of {len(digits):,} digits, more than {MAX_DIGITS}")
