"""Choosing clauses: a verb, those it may be said of, and what else is worth saying."""

from dataclasses import dataclass, replace

from writehead.data.grammar.dice import Dice
from writehead.data.grammar.frames import BE, FRAMES
from writehead.data.grammar.modifiers import (
    ADJECTIVES,
    BY_NOUN,
    DRIVEN,
    DWELLINGS,
    EVER,
    GOALS,
    HOLDERS,
    HOME_AT,
    HOME_TO,
    MANNER,
    OFTEN,
    PLACES,
    SEATS,
    TODAY,
    TOPS,
    WORKPLACES,
    Pair,
)
from writehead.data.grammar.nouns import NOUNS, Noun, nouns
from writehead.data.grammar.phrases import at, city, noun, on, since, somebody, to, when, whom
from writehead.data.grammar.tree import (
    CAN,
    LIKE,
    MAY,
    MUST,
    SHOULD,
    WANT,
    WOULD_LIKE,
    Clause,
    Modal,
    Name,
    Phrase,
    Pronoun,
    Relative,
)
from writehead.data.grammar.verbs import Frame

_TENSES = (
    (0.44, "present"), (0.12, "progressive"), (0.22, "past"), (0.13, "perfect"), (0.09, "future")
)  # fmt: skip
_MODALS = (
    (0.2, CAN), (0.2, MUST), (0.2, WANT), (0.1, SHOULD), (0.05, MAY), (0.1, WOULD_LIKE),
    (0.15, LIKE),
)  # fmt: skip
_PAST_MODALS = (CAN, MUST, WANT)
_SIMPLE_DETERMINERS = frozenset(("", "the", "a", "this", "'s", "my", "our", "your", "his", "her"))
_SIMPLE_DETERMINERS |= {"their", "piano"}

_MAKING = ("write", "bake", "cook")  # what is made belongs to nobody yet
_SEVERAL = ("every", "all", "many", "some")
_HOMELY = nouns("'garden' 'kitchen' 'living_room' 'park'")
_PUBLIC = nouns(
    "'park' 'station' 'cinema' 'restaurant' 'market' 'museum' 'library' 'shop' 'theatre'"
)
_LAIRS = nouns("'garden' 'forest' 'cellar' 'house'")
# where a deed is likely to be done
_SCENES: dict[str, tuple[Noun, ...]] = {
    "sleep": nouns("'bedroom' 'living_room' 'garden' 'hotel'"),
    "fall": nouns("'bedroom' 'living_room' 'garden' 'theatre' 'cinema'"),
    "work": WORKPLACES,
    "sing": nouns("'church' 'park' 'garden' 'theatre'"),
    "dance": nouns("'garden' 'restaurant' 'park' 'living_room'"),
    "go": nouns("'park' 'forest' 'city'"),
    "rest": nouns("'garden' 'park' 'bedroom' 'hotel' 'living_room'"),
    "read": nouns("'garden' 'library' 'park' 'living_room' 'office'"),
    "see": nouns("'forest' 'park' 'city' 'village'"),
    "look": nouns("'house' 'garden' 'park' 'office' 'cellar'"),
    "find": nouns("'house' 'garden' 'park' 'office' 'cellar' 'forest'"),
    "lose": nouns("'park' 'city' 'forest' 'station' 'cinema'"),
    "eat": nouns("'kitchen' 'garden' 'restaurant' 'park' 'hotel'"),
    "drink": nouns("'kitchen' 'garden' 'restaurant' 'hotel' 'office'"),
    "cook": nouns("'kitchen' 'restaurant'"),
    "meet": _PUBLIC,
    "pick": nouns("'station' 'airport' 'school' 'theatre'"),
    "watch": nouns("'garden' 'park' 'forest' 'market'"),
    "help": nouns("'kitchen' 'garden' 'office' 'school' 'shop'"),
    "wait": nouns("'station' 'park' 'hotel' 'restaurant' 'office'"),
    "chat": nouns("'garden' 'park' 'restaurant' 'office' 'market'"),
    "play": nouns("'garden' 'park' 'living_room' 'forest'"),
}
BY_SUBJECT: dict[Noun, tuple[Frame, ...]] = {
    n: tuple(f for f in FRAMES if n in f.subject) for n in NOUNS.values()
}
BY_OBJECT: dict[Noun, tuple[tuple[Frame, str], ...]] = {
    n: tuple(
        (f, role)
        for f in FRAMES
        for role, pool in (("accusative", f.accusative), ("dative", f.dative), ("about", f.about))
        if n in pool and not (role == "dative" and f.accusative) and f.place != "put"
    )
    for n in NOUNS.values()
}
# a verb is drawn as often as it has things to be said of, so that "eat" is not as rare as "bark"
_DRAWN = tuple(
    f for f in FRAMES for _ in range(1 + (len(f.accusative + f.dative + f.about) > 3) * 2)
)
_PERSONAL = tuple(f for f in _DRAWN if NOUNS["man"] in f.subject)
_OWNED = nouns("'brother' 'sister' 'son' 'daughter' 'father' 'mother' 'dog' 'cat' 'car' 'house'")


@dataclass(frozen=True, slots=True)
class Wish:
    """What a sentence asks of a clause; whatever is None is left to chance."""

    subject: Phrase | None = None
    frame: Frame | None = None
    tense: str | None = None
    modal: bool | None = None
    time: bool | None = None
    negated: bool | None = None
    relative: bool = True
    front: bool = True


ANY = Wish()
PLAIN = Wish(modal=False, time=False, negated=False, relative=False)


def clause(dice: Dice, wish: Wish = ANY) -> Clause:
    """A clause about somebody or something that does what it can do."""
    subject, frame = wish.subject, wish.frame
    if frame is None:
        if subject is None:
            frame = dice.one(_DRAWN)
        elif isinstance(subject.head, Noun):
            frame = dice.one(BY_SUBJECT[subject.head])
        else:
            frame = dice.one(_PERSONAL)
    if subject is None:
        subject = somebody(dice, frame.subject)
        if frame.english.base == "belong" and subject.determiner != "this":
            subject = replace(subject, determiner="the", count=0, owner=None)
    tense, modal = _tense(dice, frame, subject, wish)
    part = _complete(dice, Clause(frame, subject, tense, modal))
    if wish.negated is not False and (wish.negated or dice.chance(0.1)) and _deniable(part):
        part = replace(part, negated=True)
    part = _surround(dice, part, wish)
    return _relate(dice, part) if wish.relative else part


def _tense(dice: Dice, frame: Frame, subject: Phrase, wish: Wish) -> tuple[str, Modal | None]:
    """A tense in which the verb says one thing only, and perhaps a modal."""
    tense = wish.tense or dice.weighted(_TENSES)
    if tense == "progressive" and frame.stative:
        tense = "present"
    if tense == "past" and frame.english.timeless and (subject.many or subject.first):
        tense = "perfect"
    if frame.event and tense in ("present", "future"):
        tense = "past"
    if frame.place == "from" or (frame.state and tense in ("perfect", "future", "progressive")):
        tense = "perfect" if tense == "perfect" and frame.english.base == "live" else "present"
    willing = NOUNS["man"] in frame.subject and (wish.modal or dice.chance(0.16))
    if wish.modal is False or not willing or frame.stative or tense not in ("present", "past"):
        return tense, None
    if tense == "past":
        return tense, dice.one(_PAST_MODALS)
    return tense, dice.weighted(_MODALS)


def _complete(dice: Dice, part: Clause) -> Clause:
    """The clause with all that its verb governs."""
    frame, subject = part.verb, part.subject
    dative = whom(dice, frame.dative, subject) if frame.dative else None
    if dative and (dative.count or (dative.plural and dative.determiner == "a")):
        dative = replace(dative, determiner="the", count=0)
    single = frame.single
    accusative = about = None
    if frame.accusative:
        if dative:
            accusative = noun(dice, frame.accusative, owner=subject, single=single)
        else:
            accusative = whom(dice, frame.accusative, subject, single=single)
        shared = accusative.determiner in ("their", "our") and subject and subject.many
        if shared and isinstance(accusative.head, Noun) and "clothes" in accusative.head.kinds:
            accusative = replace(accusative, plural=True)  # nobody shares a coat
        if frame.english.particle in ("on", "off") and accusative.owner:
            accusative = replace(accusative, determiner="the", owner=None)
        if frame.english.base in _MAKING and accusative.determiner not in ("the", "a", "this", ""):
            accusative = replace(accusative, determiner="the", owner=None)
        if frame.english.base == "have":
            accusative = replace(accusative, determiner="a", owner=None, degree=0)
    if frame.about:
        about = whom(dice, frame.about, subject, single=single)
    place, direction = _complement(dice, frame)
    return replace(
        part, dative=dative, accusative=accusative, about=about, place=place, direction=direction
    )


def _complement(dice: Dice, frame: Frame) -> tuple[Pair | None, Pair | None]:
    """Where the verb wants to be, and whither it wants to go."""
    kind = frame.place
    if kind == "at":
        if frame.english.base == "live":
            return (city(dice, "in", "in") if dice.chance(0.5) else at(dice, DWELLINGS)), None
        if frame.english.base == "stay":
            return (HOME_AT if dice.chance(0.4) else at(dice, _HOMELY + _PUBLIC)), None
        return (on(dice, SEATS, "on", "auf", 2) if dice.chance(0.5) else at(dice, _HOMELY)), None
    if kind == "on":
        return on(dice, TOPS, "on", "auf", 2), None
    if kind == "put":
        if dice.chance(0.6) or frame.german.infinitive == "stellen":
            return None, on(dice, TOPS, "on", "auf", 1)
        return None, on(dice, HOLDERS, "in", "in", 1)
    if kind == "to":
        return None, HOME_TO if dice.chance(0.2) else to(
            dice, DRIVEN if frame.english.base == "drive" else GOALS
        )
    if kind == "abroad":
        return None, city(dice, "to", "nach")
    if kind == "from":
        return None, city(dice, "from", "aus")
    return None, None


def _deniable(part: Clause) -> bool:
    """Whether "not" says one thing only: no "every", no number, no "may not"."""
    phrases = (part.subject, part.accusative, part.dative, part.about)
    if part.tense == "progressive" or part.modal in (MAY, WOULD_LIKE):
        return False
    if part.modal is MUST and part.tense == "past":
        return False
    if part.subject and not part.subject.definite:
        return False
    return all(
        phrase is None or (phrase.determiner in _SIMPLE_DETERMINERS and not phrase.count)
        for phrase in phrases
    )


def _surround(dice: Dice, part: Clause, wish: Wish) -> Clause:
    """The clause with how, where, when and how often, two of them at most."""
    frame = part.verb
    manner = place = time = often = None
    front = False
    if frame.english.base in ("live", "work") and not part.negated and part.tense == "perfect":
        if wish.time is False:
            return replace(part, tense="present")
        return replace(part, tense="since", time=since(dice))
    if frame.manner and not part.negated and part.modal is not LIKE and dice.chance(0.15):
        manner = MANNER[dice.one(frame.manner)]
    elif frame.place == "in" and not part.place and dice.chance(0.28):
        place = at(dice, _SCENES.get(frame.english.base, _HOMELY))
    repeatable = part.modal is None and not part.negated and not frame.state
    if repeatable and part.tense in ("present", "perfect"):
        if part.tense == "present" and not manner and dice.chance(0.12) and frame.place != "from":
            often = dice.one(OFTEN)
            if often[0] == "never" and part.subject and part.subject.determiner in _SEVERAL:
                often = OFTEN[0]
        elif part.tense == "perfect" and dice.chance(0.35):
            often = dice.one(EVER)
    timed = part.tense in ("present", "past", "future") and not often and frame.place != "from"
    dated = not frame.state and (not frame.stative or part.tense != "present")
    skill = manner in (MANNER["well"], MANNER["badly"])  # nobody swims well on Monday
    if wish.time is not False and timed and dated and not skill and (wish.time or dice.chance(0.4)):
        time = when(dice, part.tense, rare=frame.place == "abroad")
        if part.negated and time[0].startswith("every"):
            time = TODAY
        front = wish.front and dice.chance(0.45)
    return replace(
        part, manner=manner, place=place or part.place, time=time, often=often, front=front
    )


def _relate(dice: Dice, part: Clause) -> Clause:
    """The clause, with a relative clause about its subject or its last object now and then."""
    roll = dice.below(100)
    subject = part.subject
    if roll < 10 and subject and _describable(subject):
        said = relative(dice, subject)
        if said.clause.verb is part.verb:  # who helps helps
            return part
        return replace(part, subject=replace(subject, relative=said))
    if roll > 20 or part.negated or part.manner or part.place or part.direction:
        return part
    if part.time and not part.front:
        return part
    for role in ("about", "accusative", "dative"):
        phrase: Phrase | None = getattr(part, role)
        if phrase is not None:
            if not _describable(phrase) or part.verb.to:
                return part
            said = relative(dice, phrase)
            if said.clause.verb is part.verb:
                return part
            described = replace(phrase, relative=said)
            if role == "about":
                return replace(part, about=described)
            if role == "accusative":
                return replace(part, accusative=described)
            return replace(part, dative=described)
    return part


def _describable(phrase: Phrase) -> bool:
    """Whether a relative clause may follow."""
    if isinstance(phrase.head, Pronoun | Name) or phrase.head.mass or phrase.owner:
        return False
    return phrase.determiner in ("the", "a", "this") and "family" not in phrase.head.kinds


def relative(dice: Dice, about: Phrase) -> Relative:
    """A clause about a noun in which the noun has a part of its own."""
    head = about.head
    assert isinstance(head, Noun)
    tense = dice.weighted(((0.6, "present"), (0.4, "past")))
    wish = replace(PLAIN, tense=tense)
    roll = dice.below(100)
    if "person" in head.kinds and roll < 12:
        return _whose(dice)
    if head in PLACES and roll < 60:
        part = clause(dice, replace(wish, frame=dice.one(_SETTLED[head in _LIVED_IN])))
        english, where, _, _ = PLACES[head]
        return Relative(replace(part, place=None), "place", (english, where))
    alive = head.kinds & {"person", "animal"}
    if BY_OBJECT[head] and (roll < 60 or not alive):
        frame, role = dice.one(BY_OBJECT[head])
        part = replace(clause(dice, replace(wish, frame=frame)), often=None)
        if role == "about":
            return Relative(replace(part, about=None), role)
        if role == "dative":
            return Relative(replace(part, dative=None), role)
        return Relative(replace(part, accusative=None), role)
    frames = BY_SUBJECT[head]
    if frames and dice.chance(0.75):
        part = clause(dice, replace(wish, frame=dice.one(frames), subject=about))
        return Relative(replace(part, subject=None, often=None), "nominative")
    return Relative(Clause(BE, None, predicate=quality(dice, head)), "nominative")


_LIVED_IN = nouns("settlement 'house' 'hotel' 'castle'")
_SETTLED = (
    tuple(f for f in FRAMES if f.name in ("work/arbeiten", "meet/treffen", "wait/warten")),
    tuple(f for f in FRAMES if f.name in ("live/wohnen", "work/arbeiten")),
)


def quality(dice: Dice, head: Noun) -> Pair:
    """An adjective as a predicate: very old, sehr alt."""
    adjective = dice.one(BY_NOUN[head])
    english, word = adjective.english[0], adjective.german[0]
    if adjective.rank < 3 and english != "broken" and dice.chance(0.3):
        return f"very {english}", f"sehr {word}"
    return english, word


def _whose(dice: Dice) -> Relative:
    """A clause about what belongs to the noun."""
    owned = Phrase(dice.one(_OWNED), "whose")
    assert isinstance(owned.head, Noun)
    part = Clause(BE, owned, predicate=quality(dice, owned.head))
    return Relative(part, "whose")


def reason(dice: Dice, part: Clause) -> Clause | None:
    """Why the subject does it: because of its own state, or of what the object is like."""
    phrases = [(part.verb.because, part.subject)]
    phrases.append((part.verb.because_object, part.accusative or part.dative or part.about))
    if dice.chance(0.5):
        phrases.reverse()
    for words, phrase in phrases:
        if phrase is None or phrase.determiner in ("every", "many"):
            continue
        stand_in = phrase.pronoun()
        head = phrase.head
        fitting = [a for a in map(ADJECTIVES.__getitem__, words) if a not in phrase.adjectives]
        if isinstance(head, Noun):
            fitting = [adjective for adjective in fitting if head in adjective.of]
        else:
            fitting = [a for a in fitting if NOUNS["woman"] in a.of and NOUNS["man"] in a.of]
        if stand_in and fitting:
            adjective = dice.one(fitting)
            tense = "past" if part.tense in ("past", "pluperfect") else "present"
            said = (adjective.english[0], adjective.german[0])
            return Clause(BE, stand_in, tense, predicate=said)
    return None
