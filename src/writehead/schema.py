"""Validation of frozen dataclasses, and their conversion to and from JSON."""

import dataclasses
import functools
import itertools
import json
import math
import operator
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, Literal, Self, TypeVar, Union, get_args, get_origin, get_type_hints

from writehead.errors import ConfigError, nearest, shown
from writehead.util.json_files import JsonError, parse_json

INT32 = 2**31 - 1  # largest size or count: kernels and libraries use 32-bit integers
INT64 = 2**63 - 1

LIMITS = {
    "ge": (operator.ge, "at least"),
    "gt": (operator.gt, "above"),
    "le": (operator.le, "at most"),
    "lt": (operator.lt, "below"),
}
WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "text", NoneType: "null"}


class JsonConfig:
    """Adds conversion to and from JSON to a dataclass."""

    def to_json(self) -> dict[str, Any]:
        """Returns the fields as JSON values."""
        return dataclasses.asdict(self)  # type: ignore[call-overload, no-any-return]

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """Reverses `to_json`; raises ConfigError for an unknown, missing or invalid field."""
        kind = cls.__name__.removesuffix("Config").lower()
        if not isinstance(data, dict):
            raise ConfigError(f"a {kind} config must be a JSON object, not {type(data).__name__}")
        fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        for name in data.keys() - fields.keys():
            hint = nearest(str(name), fields)
            raise ConfigError(f"unknown {kind} field {shown(name)}; {hint}")
        required = [name for name in fields if fields[name].default is dataclasses.MISSING]
        if missing := [name for name in required if name not in data]:
            raise ConfigError(f"the {kind} config lacks {', '.join(missing)}; add them")
        return cls(**data)


C = TypeVar("C", bound=JsonConfig)


def with_settings(config: C, settings: Mapping[str, str]) -> C:
    """Returns `config` with fields set from text, parsed as JSON (0.1, true, null) if possible."""
    values: dict[str, Any] = {}
    for name, text in settings.items():
        try:
            values[name] = parse_json(text)
        except json.JSONDecodeError:
            values[name] = text
        except JsonError as error:
            raise ConfigError(f"{name}={shown(text)} {error}") from error
    return type(config).from_json({**config.to_json(), **values})


def check_bounds(config: object, *names: str, **limits: float) -> None:
    """Raises ConfigError if a named field is not None and violates a limit: ge, gt, le or lt."""
    for name, (limit, bound) in itertools.product(names, limits.items()):
        value, (holds, words) = getattr(config, name), LIMITS[limit]
        if value is not None and not holds(value, bound):
            raise ConfigError(f"{name}={shown(value)} must be {words} {bound}")


def check_sizes(config: object, *names: str) -> None:
    """Raises ConfigError if a named field is not from 1 to 2^31 - 1; None is allowed."""
    check_bounds(config, *names, ge=1, le=INT32)


def check_types(config: Any) -> None:
    """Raises ConfigError if a field does not have its annotated type, or is not finite."""
    for name, hint in _type_hints(config.__class__).items():
        value = getattr(config, name)
        if isinstance(value, int) and not -INT64 - 1 <= value <= INT64:
            raise ConfigError(f"{name}={shown(value)} does not fit in 64 bits")
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{name}={value} must be a finite number")
        if not _fits(value, hint):
            raise ConfigError(f"{name}={shown(value)} must be {_describe(hint)}")


@functools.cache
def _type_hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _fits(value: object, hint: Any) -> bool:
    if get_origin(hint) in (Union, UnionType):
        return any(_fits(value, option) for option in get_args(hint))
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, (int, float) if hint is float else hint)  # JSON may write 1.0 as 1


def _describe(hint: Any) -> str:
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(map(_describe, get_args(hint)))
    if get_origin(hint) is Literal:
        return " or ".join(map(repr, get_args(hint)))
    return WORDS[hint]
