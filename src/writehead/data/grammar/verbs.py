"""Verbs: the forms of both languages, and what a use of a verb asks of those around it."""

from dataclasses import dataclass

from writehead.data.grammar.nouns import Noun

DOUBLING = frozenset({"get", "put", "swim", "run", "sit", "stop", "forget", "begin", "plan"})
DOUBLING |= {"travel", "hug", "cut", "chat"}
INSEPARABLE = ("be", "ver", "er", "ent", "emp", "zer", "um")
SEIN, HABEN = "sein", "haben"


@dataclass(frozen=True, slots=True, eq=False)
class EnglishVerb:
    """The forms of an English verb; `particle` follows a pronoun unless it is `fixed`."""

    base: str
    third: str
    past: str
    participle: str
    ing: str
    particle: str
    fixed: bool  # listens to him, but switches it on

    @property
    def timeless(self) -> bool:
        """Whether "they put" could be today or yesterday."""
        return self.base == self.past


@dataclass(frozen=True, slots=True, eq=False)
class GermanVerb:
    """The forms of a German verb that ich, er and the plural take, without its prefix."""

    infinitive: str
    first: str
    third: str
    past: str
    participle: str
    auxiliary: str
    prefix: str
    reflexive: bool

    @property
    def past_plural(self) -> str:
        """What wir and sie take in the preterite."""
        return self.past + ("n" if self.past.endswith("e") else "en")

    @property
    def joined(self) -> str:
        """The infinitive with its prefix: aufstehen, spazieren gehen."""
        return self.prefix.replace("_", " ") + self.infinitive

    @property
    def to(self) -> str:
        """The infinitive with zu: zu lesen, aufzustehen, spazieren zu gehen."""
        zu = "zu" if self.prefix and not self.prefix.endswith("_") else "zu "
        return self.prefix.replace("_", " ") + zu + self.infinitive

    @property
    def perfect(self) -> str:
        """The participle with its prefix."""
        return self.prefix.replace("_", " ") + self.participle


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """A verb in one use: its subject, objects and complements, and the company it keeps.

    `place` is "" for none, "in" for an optional setting, "at" for a complement that says where,
    "to" for one that says whither, "put" for one that says where an object goes.
    `because` and `because_object` are adjectives that explain the deed.
    """

    english: EnglishVerb
    german: GermanVerb
    subject: tuple[Noun, ...]
    accusative: tuple[Noun, ...] = ()
    dative: tuple[Noun, ...] = ()
    to: bool = False  # the English dative comes last, with "to"
    preposition: tuple[str, str, int] | None = None  # English, German, case
    about: tuple[Noun, ...] = ()  # what the preposition governs
    place: str = ""
    manner: tuple[str, ...] = ()
    stative: bool = False  # neither begun nor willed: no progressive, no modal
    state: bool = False  # holds without a date: knows, not "knew on Monday"
    event: bool = False  # over as soon as it happens: lost, not "loses"
    single: bool = False  # done to one thing at a time
    because: tuple[str, ...] = ()
    because_object: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What tells it apart in a test: read/lesen."""
        return f"{self.english.base}/{self.german.joined}"


def english_verb(words: str) -> EnglishVerb:
    """The verb of "base [past participle] [+particle]", = for a fixed one; the rest is regular."""
    *forms, last = words.split()
    particle = last[1:].replace("_", " ") if last[0] in "+=" else ""
    base, *irregular = forms if particle else [*forms, last]
    y = base.endswith("y") and base[-2] not in "aeiou"
    longer = base + base[-1] if base in DOUBLING else base
    if y:
        third, past = base[:-1] + "ies", base[:-1] + "ied"
    else:
        third = base + ("es" if base.endswith(("s", "x", "ch", "sh", "o")) else "s")
        past = longer + ("d" if base.endswith("e") else "ed")
    if base.endswith("ie"):
        ing = base[:-2] + "ying"
    elif base.endswith("e") and not base.endswith("ee"):
        ing = base[:-1] + "ing"
    else:
        ing = longer + "ing"
    past, participle = irregular if irregular else (past, past)
    third = {"have": "has", "be": "is"}.get(base, third)
    ing = "being" if base == "be" else ing
    return EnglishVerb(base, third, past, participle, ing, particle, last[0] == "=")


def german_verb(words: str) -> GermanVerb:
    """The verb of "[sich] [prefix|]infinitive [third past participle] [sein]"."""
    parts = words.split()
    reflexive = parts[0] == "sich"
    parts = parts[reflexive:]
    auxiliary = parts.pop() if parts[-1] == SEIN and len(parts) > 1 else HABEN
    prefix, _, infinitive = parts[0].rpartition("|")
    stem = infinitive[:-2] if infinitive.endswith("en") else infinitive[:-1]
    first = infinitive[:-3] + "le" if infinitive.endswith("eln") else stem + "e"
    if len(parts) > 1:
        third, past, participle = parts[1:]
        first = {"wissen": "weiß", "sein": "bin"}.get(infinitive, first)
    else:
        e = "e" if stem.endswith(("t", "d", "ffn", "chn")) else ""
        ge = "" if infinitive.startswith(INSEPARABLE) or infinitive.endswith("ieren") else "ge"
        third, past, participle = stem + e + "t", stem + e + "te", ge + stem + e + "t"
    return GermanVerb(infinitive, first, third, past, participle, auxiliary, prefix, reflexive)
