"""Choosing phrases: who and what a sentence is about, when it happens and where."""

from writehead.data.grammar import german
from writehead.data.grammar.dice import Dice
from writehead.data.grammar.english import noun_phrase
from writehead.data.grammar.modifiers import (
    COMPARED,
    DAYS,
    LASTING,
    MONTHS,
    PARTS,
    PLACES,
    SEASONS,
    SPANS,
    TOMORROW,
    YESTERDAY,
    Adjective,
    Pair,
)
from writehead.data.grammar.nouns import CITIES, NAMES, NOUNS, Noun, nouns
from writehead.data.grammar.numbers import english_number, german_number
from writehead.data.grammar.tree import SOMEBODY, YOU, Name, Phrase, Pronoun

PEOPLE = tuple(Name(english, pronoun) for english, pronoun in NAMES)
_ANYBODY = NOUNS["man"]  # whoever may be a man may also be I, Anna or they
_SINGULAR = ((0.5, "the"), (0.22, "a"), (0.08, "this"), (0.15, "own"), (0.05, "'s"))
_PLURAL = (
    (0.36, "the"), (0.2, "a"), (0.08, "this"), (0.08, "many"), (0.08, "some"), (0.05, "all"),
    (0.15, "count"),
)  # fmt: skip
_OWNERS = ("my", "our", "your", "his", "her", "their")
_SIBLINGS = frozenset(("brother", "sister", "son", "daughter", "uncle", "aunt"))
# what belongs to somebody; one does not say "my castle" or "my customer"
_OWNED = frozenset(("own", "family", "pet", "clothes", "thing", "furniture", "readable", "home"))
# those of whom there are enough for "every" and "all"
_COMMON = frozenset(("job", "child", "partner", "own"))
_OWNED |= {"instrument", "room", "machine"}


def pronoun(head: Pronoun) -> Phrase:
    """The phrase that is only a pronoun."""
    return Phrase(head, plural=head.plural)


def somebody(dice: Dice, pool: tuple[Noun, ...]) -> Phrase:
    """A subject: a pronoun, a name, two names or a noun of the pool."""
    if _ANYBODY in pool:
        roll = dice.below(100)
        if roll < 22:
            return pronoun(dice.one(SOMEBODY))
        if roll < 30:
            return Phrase(dice.one(PEOPLE))
        if roll < 33:
            first, second = dice.one(PEOPLE[:4]), dice.one(PEOPLE[4:])
            return Phrase(first, also=Phrase(second))
    return noun(dice, pool, subject=True)


def whom(
    dice: Dice, pool: tuple[Noun, ...], subject: Phrase | None, *, single: bool = False
) -> Phrase:
    """An object: now and then a pronoun or a name, else a noun of the pool."""
    if _ANYBODY in pool and subject is not None:
        roll = dice.below(100)
        if roll < 16:
            head = dice.one(SOMEBODY)
            clash = isinstance(subject.head, Pronoun) and (
                head is subject.head or head.first == subject.head.first is True
            )
            if not clash and head is not YOU:
                return pronoun(head)
        elif roll < 24:
            name = dice.one(PEOPLE)
            also = subject.also.head if subject.also else None
            if name is not subject.head and name is not also:
                return Phrase(name)
    phrase = noun(dice, pool, owner=subject, single=single)
    while subject is not None and phrase.head is subject.head and len(pool) > 1:
        phrase = noun(dice, pool, owner=subject, single=single)  # no waiter greets the waiter
    return phrase


def noun(
    dice: Dice,
    pool: tuple[Noun, ...],
    *,
    subject: bool = False,
    owner: Phrase | None = None,
    single: bool = False,
) -> Phrase:
    """A noun of the pool with a determiner and adjectives that fit it."""
    head = dice.one(pool)
    if "leisure" in head.kinds:
        return Phrase(head)
    if head.mass:
        adjectives, _ = _adjectives(dice, head, "")
        return Phrase(head, "the" if subject or dice.chance(0.3) else "", adjectives=adjectives)
    family = "family" in head.kinds
    few = single or "noble" in head.kinds or (family and head.english not in _SIBLINGS)
    plural = not few and dice.chance(0.25)
    count = 0
    if family:
        determiner = "'s" if not plural and dice.chance(0.12) else "own"
    else:
        determiner = dice.weighted(_PLURAL if plural else _SINGULAR)
        if determiner == "count":
            determiner, count = ("", 2 + dice.below(11))
        elif determiner in ("own", "'s") and not head.kinds & _OWNED:
            determiner = "the"
        elif determiner == "the" and subject and head.kinds & _COMMON and dice.chance(0.06):
            determiner = "all" if plural else "every"
        elif (determiner == "a" and plural and "person" in head.kinds and dice.chance(0.8)) or (
            determiner == "all" and "person" not in head.kinds
        ):
            determiner = "the"
        elif determiner == "a" and plural and subject and dice.chance(0.7):
            determiner = "the"  # "teachers read" says something about all of them
    possessor = None
    if determiner == "'s":
        possessor = _possessor(dice, head, owner)
    elif determiner == "own":
        determiner = _own(dice, owner)
    adjectives, degree = _adjectives(dice, head, determiner)
    return Phrase(head, determiner, plural, count, adjectives, degree, possessor)


def _possessor(dice: Dice, head: Noun, subject: Phrase | None) -> Phrase:
    """Somebody else to whom it belongs: a name, or the teacher."""
    doer = subject.head if subject else None
    also = subject.also.head if subject and subject.also else None
    while True:
        if dice.chance(0.5):
            name = dice.one(PEOPLE)
            if name is not doer and name is not also:
                return Phrase(name)
        else:
            owner = dice.one(_POSSESSORS)
            if owner is not head and owner is not doer:
                return Phrase(owner, "the")


_POSSESSORS = nouns("'teacher' 'doctor' 'student' 'woman' 'boy' 'king' 'farmer' 'child'")


def _own(dice: Dice, owner: Phrase | None) -> str:
    """The possessive of the subject, or of whoever speaks."""
    if owner is not None:
        stand_in = owner.pronoun()
        if stand_in and isinstance(stand_in.head, Pronoun) and stand_in.head.owner:
            return stand_in.head.owner
        return "my"
    return dice.one(_OWNERS)


def _adjectives(dice: Dice, head: Noun, determiner: str) -> tuple[tuple[Adjective, ...], int]:
    """None, one or two adjectives in their order, and the degree of the first."""
    fitting = LASTING[head]
    if not fitting or not dice.chance(0.35):
        return (), 0
    first = dice.one(fitting)
    if determiner == "the" and first.english[0] in COMPARED and dice.chance(0.1):
        return (first,), 2
    if dice.chance(0.15) and first.english[0] != "modern":
        second = dice.one(fitting)
        if first.rank < second.rank:
            return (first, second), 0
    return (first,), 0


def at(dice: Dice, pool: tuple[Noun, ...]) -> Pair:
    """Where something happens: in the garden, im Garten."""
    phrase = _place(dice, pool)
    assert isinstance(phrase.head, Noun)
    english, where, _, _ = PLACES[phrase.head]
    return f"{english} {noun_phrase(phrase)}", german.prepositional(where, phrase, german.DATIVE)


def to(dice: Dice, pool: tuple[Noun, ...]) -> Pair:
    """Whither somebody goes: to the garden, in den Garten."""
    phrase = _place(dice, pool)
    assert isinstance(phrase.head, Noun)
    _, _, whither, case = PLACES[phrase.head]
    return f"to {noun_phrase(phrase)}", german.prepositional(whither, phrase, case)


def on(dice: Dice, pool: tuple[Noun, ...], english: str, word: str, case: int) -> Pair:
    """On or in a piece of furniture, at rest (dative) or on the way there (accusative)."""
    phrase = _place(dice, pool)
    return f"{english} {noun_phrase(phrase)}", german.prepositional(word, phrase, case)


def _place(dice: Dice, pool: tuple[Noun, ...]) -> Phrase:
    """A place one can point at."""
    head = dice.one(pool)
    determiner = dice.weighted(((0.85, "the"), (0.08, "a"), (0.07, "this")))
    if determiner == "a" and head.kinds & {"room", "home"}:
        determiner = "the"
    adjectives: tuple[Adjective, ...] = ()
    if LASTING[head] and dice.chance(0.25):
        adjectives = (dice.one(LASTING[head]),)
    return Phrase(head, determiner, adjectives=adjectives)


def city(dice: Dice, english: str, word: str) -> Pair:
    """A preposition and a city or a country."""
    name, german_name = dice.one(CITIES)
    return f"{english} {name}", f"{word} {german_name}"


def clock(dice: Dice) -> Pair:
    """An hour of the day: at half past seven, um halb acht."""
    hour = 1 + dice.below(11)
    english, word = english_number(hour), german_number(hour)
    roll = dice.below(5)
    if roll == 0:
        return f"at half past {english}", f"um halb {german_number(hour + 1)}"
    if roll == 1:
        return f"at a quarter past {english}", f"um Viertel nach {word}"
    return f"at {english} o'clock", f"um {'ein' if hour == 1 else word} Uhr"


def when(dice: Dice, tense: str, *, rare: bool = False) -> Pair:
    """A time that goes with the tense; `rare` is for what one does not do every day."""
    if tense in ("past", "future") and dice.chance(0.45):
        if dice.chance(0.6):
            return dice.one(YESTERDAY if tense == "past" else TOMORROW)
        n = 2 + dice.below(5)
        span, german_span = dice.one(SPANS if rare else SPANS[:2])
        if tense == "past":
            return f"{english_number(n)} {span} ago", f"vor {german_number(n)} {german_span}"
        return f"in {english_number(n)} {span}", f"in {german_number(n)} {german_span}"
    if tense == "present" and not rare and dice.chance(0.35):
        if dice.chance(0.5):
            return dice.one((("today", "heute"), ("every day", "jeden Tag")))
        day, german_day = dice.one(DAYS)
        return f"every {day}", f"jeden {german_day}"
    roll = dice.below(12)
    if roll < 3 and not rare:
        return clock(dice)
    if roll < 7 or (roll > 9 and not rare and dice.chance(0.7)):
        english, word = dice.one(DAYS)
        return f"on {english}", f"am {word}"
    if roll < 10 and not rare:
        english, word = dice.one(PARTS)
        return f"in the {english}", f"am {word}"
    english, word = dice.one(SEASONS if roll == 10 else MONTHS)
    return f"in {english}", f"im {word}"


def since(dice: Dice) -> Pair:
    """How long: for three years, seit drei Jahren."""
    n = 2 + dice.below(11)
    span, german_span = dice.one(SPANS)
    return f"for {english_number(n)} {span}", f"seit {german_number(n)} {german_span}"
