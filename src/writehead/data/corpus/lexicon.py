"""The words of `lexicon.txt` with all their inflected forms."""

import re
from dataclasses import dataclass
from importlib.resources import files
from typing import NamedTuple

NOMINATIVE, ACCUSATIVE, DATIVE = range(3)
Pair = tuple[str, str]  # an English and a German text


@dataclass(frozen=True, slots=True, eq=False)
class Noun:
    """A noun or a name; German forms are in order of case."""

    english: str
    english_plural: str
    gender: str  # m, f or n
    german: tuple[str, str, str]
    german_plural: tuple[str, ...]  # empty for names and nouns without a plural
    kinds: frozenset[str]


@dataclass(frozen=True, slots=True, eq=False)
class Adjective:
    """An adjective that describes nouns of some kinds."""

    english: str
    german: str
    stem: str  # before a German ending: teur-
    kinds: frozenset[str]


class EnglishVerb(NamedTuple):
    """The forms of an English verb. A pronoun precedes its particle if that is `movable`."""

    base: str
    third: str
    past: str
    participle: str
    ing: str
    particle: str
    movable: bool


class GermanVerb(NamedTuple):
    """The forms of a German verb, without its separable prefix except in the participle."""

    infinitive: str
    first: str
    third: str
    past: str
    participle: str
    prefix: str
    auxiliary: str


@dataclass(frozen=True, slots=True, eq=False)
class Verb:
    """A verb in one of its meanings, with the nouns that fit each of its slots."""

    english: EnglishVerb
    german: GermanVerb
    subjects: tuple[Noun, ...]
    accusatives: tuple[Noun, ...]
    datives: tuple[Noun, ...]
    preposition: tuple[str, str, int]  # English, German and its case
    prepositionals: tuple[Noun, ...]
    place: str  # "in" is optional, "at" and "to" are required
    places: tuple[Noun, ...]
    state: bool
    event: bool


def _read() -> dict[str, list[list[str]]]:
    """Reads the columns of every line, by section."""
    sections: dict[str, list[list[str]]] = {}
    text = files(__package__).joinpath("lexicon.txt").read_text(encoding="utf-8")
    for line in text.splitlines():
        if line.startswith("["):
            rows = sections.setdefault(line.strip("[]"), [])
        elif line and not line.startswith("#"):
            rows.append([column.strip() for column in line.split("|")])
    return sections


def _with_s(word: str) -> str:
    """Returns the regular plural of a noun or third person of a verb."""
    return word + ("es" if word.endswith(("s", "x", "ch", "sh")) else "s")


def _noun(entry: str, kinds: str) -> Noun:
    english, gender, german, plural = entry.split()
    singular, _, irregular = english.partition("/")
    nominative, _, oblique = german.partition("/")  # der Junge, den Jungen
    dative_plural = plural if plural.endswith(("n", "s")) else plural + "n"
    return Noun(
        singular,
        irregular or re.sub("([^aeiou])ys$", r"\1ies", _with_s(singular)),
        gender,
        (nominative, oblique or nominative, oblique or nominative),
        () if plural == "-" else (plural, plural, dative_plural),
        frozenset({singular, *kinds.split()}),
    )


def _adjective(english: str, german: str, kinds: str) -> Adjective:
    word, _, stem = german.partition(" ")
    return Adjective(english, word, stem or word, frozenset(kinds.split()))


def _english_verb(text: str) -> EnglishVerb:
    base, *rest = text.split()
    particle = rest.pop() if rest and rest[-1][0] in "+=" else ""
    third = {"have": "has", "go": "goes", "try": "tries"}.get(base, _with_s(base))
    stem = re.sub("^([^aeiou]*[aeiou])([^aeiouwxy])$", r"\1\2\2", base).removesuffix("e")
    past, participle = rest or ["tried" if base == "try" else stem + "ed"] * 2
    movable = particle.startswith("+")
    return EnglishVerb(base, third, past, participle, stem + "ing", particle[1:], movable)


def _german_verb(text: str) -> GermanVerb:
    prefixed, *irregular = text.removesuffix(" sein").split()
    prefix, _, infinitive = prefixed.rpartition("/")
    stem = re.sub("e?n$", "", infinitive)
    root = stem + "e" if re.search("[td]$|[fg]n$", stem) else stem  # arbeit-e-t, öffn-e-t
    ge = "" if re.search("^(be|ver|er)|ieren$", infinitive) else "ge"
    third, past, participle = irregular or (root + "t", root + "te", f"{ge}{root}t")
    first = stem + "e" if third.endswith("t") else third  # but ich mag, ich weiß
    auxiliary = "sein" if text.endswith(" sein") else "haben"
    return GermanVerb(infinitive, first, third, past, prefix + participle, prefix, auxiliary)


def _verb(english: str, german: str, subject: str = "", slots: str = "") -> Verb:
    fillers = {name: value for name, _, value in (slot.partition("=") for slot in slots.split())}
    place = next((name for name in ("in", "at", "to") if name in fillers), "")
    governed = next((name for name in fillers if "/" in name), "/+")
    preposition, german_preposition, case = re.split("[/+]", governed)
    return Verb(
        _english_verb(english),
        _german_verb(german),
        nouns(subject),
        nouns(fillers.get("acc", "")),
        nouns(fillers.get("dat", "")),
        (preposition, german_preposition, ACCUSATIVE if case == "acc" else DATIVE),
        nouns(fillers.get(governed, "")),
        place,
        nouns(fillers.get(place, "")),
        "state" in fillers,
        "event" in fillers,
    )


def nouns(kinds: str) -> tuple[Noun, ...]:
    """Returns the nouns of any of these kinds; the English word of a noun is one of its kinds."""
    wanted = set(re.split("[ ,]", kinds))
    return tuple(noun for noun in NOUNS.values() if noun.kinds & wanted)


def _phrases(text: str) -> tuple[Pair, ...]:
    pairs = (pair.partition(" = ") for pair in text.split(", "))
    return tuple((english, german) for english, _, german in pairs)


_SECTIONS = _read()
_NOUNS = [_noun(entry, kinds) for kinds, row in _SECTIONS["nouns"] for entry in row.split(", ")]
NOUNS = {noun.english: noun for noun in _NOUNS}
ADJECTIVES = {word.english: word for word in (_adjective(*row) for row in _SECTIONS["adjectives"])}
VERBS = tuple(_verb(*row) for row in _SECTIONS["verbs"])
PHRASES = {name: _phrases(text) for name, text in _SECTIONS["phrases"]}
