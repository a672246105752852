"""The models that a server has loaded, found by name or by language pair."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from writehead.engine import Engine
from writehead.errors import ConfigError, nearest, shown
from writehead.model import TranslationModel
from writehead.serving.errors import ApiError

PAIR = re.compile(r"([a-z]{2,3})[-_]([a-z]{2,3})")
AUTO = "auto"  # a source language that the client does not know
NAMES = {
    "ar": "Arabic",
    "bg": "Bulgarian",
    "cs": "Czech",
    "da": "Danish",
    "de": "German",
    "el": "Greek",
    "en": "English",
    "es": "Spanish",
    "et": "Estonian",
    "fi": "Finnish",
    "fr": "French",
    "he": "Hebrew",
    "hi": "Hindi",
    "hu": "Hungarian",
    "id": "Indonesian",
    "it": "Italian",
    "ja": "Japanese",
    "ko": "Korean",
    "lt": "Lithuanian",
    "lv": "Latvian",
    "nl": "Dutch",
    "pl": "Polish",
    "pt": "Portuguese",
    "ro": "Romanian",
    "ru": "Russian",
    "sk": "Slovak",
    "sl": "Slovenian",
    "sv": "Swedish",
    "tr": "Turkish",
    "uk": "Ukrainian",
    "vi": "Vietnamese",
    "zh": "Chinese",
}


@dataclass(frozen=True, eq=False)
class Served:
    """A model with the name that clients use, and its source and target language, if known."""

    name: str
    engine: Engine
    languages: tuple[str, str] | None = None

    @property
    def translates(self) -> bool:
        """Whether this is a translation model; otherwise, it is a language model."""
        return isinstance(self.engine.model, TranslationModel)


def parse_pair(text: str) -> tuple[str, str]:
    """Returns the two languages of a pair such as en-de."""
    match = PAIR.fullmatch(text.lower())
    if match is None:
        raise ConfigError(f"{shown(text)} is not a language pair such as en-de")
    return match[1], match[2]


def pair_of(name: str) -> tuple[str, str] | None:
    """Returns the language pair at the end of a model's name, as in opus-mt-en-de, if any."""
    match = re.search(rf"(?:^|[^a-z]){PAIR.pattern}$", name.lower())
    return (match[1], match[2]) if match else None


class Models:
    """All models of a server; the first is the default."""

    def __init__(self, models: Sequence[Served]) -> None:
        if not models:
            raise ConfigError("a server needs at least one model")
        self.by_name: dict[str, Served] = {}
        for one in models:
            if one.name in self.by_name:
                raise ConfigError(f"two models are named {shown(one.name)}; choose other names")
            self.by_name[one.name] = one

    def __iter__(self) -> Iterator[Served]:
        return iter(self.by_name.values())

    def named(self, name: str) -> Served:
        """Returns a model by name."""
        if name not in self.by_name:
            hint = nearest(name, self.by_name)
            raise ApiError(404, f"the model {shown(name)} does not exist; {hint}")
        return self.by_name[name]

    def translator(
        self, name: str | None = None, source: str | None = None, target: str | None = None
    ) -> Served:
        """Returns a translation model by name or languages; the default is the first."""
        if name is not None:
            found = [self.named(name)]
        else:
            found = [one for one in self if one.translates and _speaks(one, source, target)]
        if not found:
            known = ", ".join("-".join(one.languages) for one in self if one.languages)
            wanted = f"{source or AUTO} to {target or 'any language'}"
            hint = f"choose from {known}" if known else "name a model"
            raise ApiError(404, f"no model translates {shown(wanted)}; {hint}")
        if not found[0].translates:
            raise ApiError(422, f"{shown(name)} is a language model; it cannot translate")
        return found[0]

    def writer(self, name: str) -> Served:
        """Returns a language model by name."""
        found = self.named(name)
        if found.translates:
            raise ApiError(422, f"{shown(name)} is a translation model; use /v1/translate")
        return found

    def languages(self) -> list[dict[str, object]]:
        """Returns all source languages and their targets, as LibreTranslate lists them."""
        targets: dict[str, list[str]] = {}
        for one in self:
            if one.languages is not None and one.translates:
                source, target = one.languages
                targets.setdefault(source, []).append(target)
                targets.setdefault(target, [])
        return [
            {"code": code, "name": language_name(code), "targets": sorted({*targets[code]})}
            for code in sorted(targets)
        ]


def language_name(code: str) -> str:
    """Returns the English name of a language, or its code."""
    return NAMES.get(code, code)


def _speaks(model: Served, source: str | None, target: str | None) -> bool:
    """Returns whether a model has these languages; a region, as in en-GB, is ignored."""
    wanted = [re.split("[-_]", (one or AUTO).lower())[0] for one in (source, target)]
    if wanted == [AUTO, AUTO]:
        return True
    return model.languages is not None and all(
        want in (AUTO, own) for want, own in zip(wanted, model.languages, strict=True)
    )
