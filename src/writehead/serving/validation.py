"""Error messages for bodies and queries that pydantic rejects."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from writehead.errors import shown
from writehead.util.extras import requires

with requires("serve"):
    from pydantic import ValidatorFunctionWrapHandler, WrapValidator
    from pydantic_core import PydanticCustomError, ValidationError

Fault = Mapping[str, Any]  # one of pydantic's errors

# what each type of error expects; a union has several errors
TYPES = {
    "string_type": "a string",
    "list_type": "a list",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "int_parsing": "an integer",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}
# limits, filled in from the ctx of pydantic's error
LIMITS = {
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "literal_error": "{expected}",
    "too_long": "at most {max_length} items",
}
KINDS = {str: "a string", list: "a list", dict: "an object", bool: "a boolean", type(None): "null"}


def _refuse(value: object, validate: ValidatorFunctionWrapHandler) -> object:
    try:
        return validate(value)
    except ValidationError:
        raise PydanticCustomError("unsupported", "is not supported") from None


# marks a field of another API that accepts only values with no effect
Unsupported = WrapValidator(_refuse)


def describe(faults: Sequence[Fault]) -> str:
    """Returns a sentence about the first field with faults, and what it should be."""
    # in a union such as str | list[str], the member closest to the value has the longest path
    first = _path(faults[0])[:1]
    some = [fault for fault in faults if _path(fault)[:1] == first]
    deepest = max(len(_path(fault)) for fault in some)
    some = [fault for fault in some if len(_path(fault)) == deepest]
    # a value of the right type comes closer than one of the wrong type
    fault = next((one for one in some if one["type"] not in TYPES), some[0])
    place = _shown_path(_path(fault))
    kind, value = fault["type"], fault.get("input")
    if kind == "missing":
        return f"{place} is missing"
    if kind == "extra_forbidden":
        return f"{place} is not a known field"
    if kind == "unsupported":
        return f"{place} is not supported; omit it"
    if kind == "string_unicode":
        return f"{place} is not UTF-8"
    expected = [TYPES[one["type"]] for one in some if one["type"] in TYPES]
    if kind in TYPES and expected:
        given = KINDS.get(type(value)) or shown(value)
        return f"{place} must be {' or '.join(dict.fromkeys(expected))}, not {given}"
    if kind in LIMITS:
        return f"{place} must be {LIMITS[kind].format(**fault['ctx'])}, not {shown(value)}"
    return f"{place}: {fault['msg']}"


def describe_json(fault: Fault, body: object) -> str:
    """Returns what is wrong with invalid JSON, and where."""
    reason, position = fault["ctx"]["error"], fault["loc"][-1]
    if isinstance(body, str) and isinstance(position, int):
        return str(json.JSONDecodeError(reason, body, position))
    return str(reason)


def _path(fault: Fault) -> list[str | int]:
    """Returns the names and indices that lead to a value, without the members of unions."""
    field, *rest = fault["loc"][1:] or [None]
    names = [part for part in rest if part != "str" and not str(part).startswith("list[")]
    return [] if field is None else [field, *names]


def _shown_path(path: Sequence[str | int]) -> str:
    if not path:
        return "the body"
    return str(path[0]) + "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}" for part in path[1:]
    )
