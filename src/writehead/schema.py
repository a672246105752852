"""What makes a frozen dataclass a schema: JSON in and out, and checks that say what to do."""

import dataclasses
import json
import math
import types
from collections.abc import Mapping
from typing import Any, Literal, Self, TypeVar, Union, get_args, get_origin, get_type_hints

from writehead.errors import ConfigError, nearest, shown
from writehead.util.json_files import JsonError, parse_json

INT32 = 2**31 - 1  # maximum size or count: kernels and libraries use 32-bit integers
INT64 = 2**63 - 1


class JsonConfig:
    """JSON in and out for the dataclasses below."""

    def to_json(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return dataclasses.asdict(self)  # type: ignore[call-overload, no-any-return]

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """The config that `to_json` wrote; an unknown, missing or ill-typed field is an error."""
        what = cls.__name__.removesuffix("Config").lower()
        if not isinstance(data, dict):
            raise ConfigError(f"a {what} config is a JSON object, not {type(data).__name__}")
        fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        for name in data:
            if name not in fields:
                known = nearest(str(name), fields)
                raise ConfigError(f"unknown {what} field {shown(name)}; {known}")
        missing = [
            name
            for name, field in fields.items()
            if field.default is dataclasses.MISSING and name not in data
        ]
        if missing:
            raise ConfigError(f"the {what} config lacks {', '.join(missing)}; add them")
        return cls(**data)


C = TypeVar("C", bound=JsonConfig)


def with_settings(config: C, settings: Mapping[str, str]) -> C:
    """`config` with fields set from text, as the command line's `--set` gives them.

    A value is read as JSON where it is JSON (0.1, true, null), else as a word.
    """
    values: dict[str, Any] = {}
    for name, text in settings.items():
        try:
            values[name] = parse_json(text)
        except json.JSONDecodeError:
            values[name] = text
        except JsonError as error:
            raise ConfigError(f"{name}={shown(text)} {error}") from error
    return type(config).from_json({**config.to_json(), **values})


def check_positive(config: Any, *names: str, most: int = INT32) -> None:
    """Raises ConfigError if a named field is below 1 or above `most`; None is allowed."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name}={value} must be at least 1")
        if value is not None and value > most:
            raise ConfigError(f"{name}={value} must be at most {most}")


def check_seed(seed: int, bits: int = 63) -> None:
    """Raises ConfigError unless the seed has at most `bits` bits; PyTorch accepts 63."""
    if not 0 <= seed < 1 << bits:
        raise ConfigError(f"seed={shown(seed)} must be from 0 to 2^{bits} - 1")


def check_types(config: Any) -> None:
    """Raises where a field's value is not of its annotated type, as may happen with JSON."""
    for name, hint in get_type_hints(type(config)).items():
        value = getattr(config, name)
        if isinstance(value, int) and not -INT64 - 1 <= value <= INT64:
            raise ConfigError(f"{name}={shown(value)} does not fit into 64 bits")
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{name}={value} is not a finite number")
        if not _fits(value, hint):
            whole = isinstance(value, float) and value.is_integer() and int in _members(hint)
            advice = f"; write {int(value)}" if whole else ""  # JSON reads 1e5 as 100000.0
            raise ConfigError(f"{name}={shown(value)} is not {_words(hint)}{advice}")


def _words(hint: Any) -> str:
    """What values a type has."""
    words = {int: "a whole number", float: "a number", bool: "true or false"}
    words |= {str: "text", types.NoneType: "null"}
    return " or ".join(
        " or ".join(map(repr, get_args(part))) if get_origin(part) is Literal else words[part]
        for part in _members(hint)
    )


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _fits(value: object, hint: Any) -> bool:
    for part in _members(hint):
        if get_origin(part) is Literal:
            if value in get_args(part):
                return True
        elif part is float:  # JSON writes 1.0 as 1
            if isinstance(value, int | float) and not isinstance(value, bool):
                return True
        elif isinstance(value, part) and not (isinstance(value, bool) and part is int):
            return True
    return False
