"""Choosing sentences of one clause, and how often each kind of sentence is chosen."""

from collections.abc import Callable
from dataclasses import replace

from writehead.data.grammar import german
from writehead.data.grammar.clauses import PLAIN, Wish, clause, quality
from writehead.data.grammar.dice import Dice
from writehead.data.grammar.english import noun_phrase
from writehead.data.grammar.frames import BE, BECOME, COST, HAVE, PLAY, PLEASE
from writehead.data.grammar.joins import (
    DEEDS,
    about_known,
    asked,
    attempted,
    conceded,
    conditional,
    explained,
    joined,
    known,
    person,
    purposeful,
    reported,
    sequenced,
    state,
    verbs,
    weather,
)  # fmt: skip
from writehead.data.grammar.modifiers import BY_NOUN, COMPARED
from writehead.data.grammar.nouns import NOUNS, Noun, nouns
from writehead.data.grammar.numbers import english_number, german_number
from writehead.data.grammar.phrases import clock, noun, when
from writehead.data.grammar.tree import (
    CAN,
    HE,
    LIKE,
    MUST,
    SHE,
    SHOULD,
    YOU,
    Clause,
    I,
    Phrase,
    Sentence,
)  # fmt: skip

_DESCRIBED = tuple(head for head in NOUNS.values() if BY_NOUN[head])
_JOBS = nouns("job")
_RELATIVES = nouns("family 'neighbour' 'friend'")
_WARES = nouns("dear clothes")
_LIKED = nouns("clothes furniture gift settlement sung painted tale 'car' 'hotel' 'garden'")
_INSTRUMENTS = nouns("instrument")
_AGED = nouns("sight 'house' settlement 'tree'")
_SETTLEMENTS = nouns("settlement")
_PRAISE = ("friendly", "young", "clever", "rich")
_ORDERS = verbs(
    "open/öffnen close/schließen clean/putzen wash/waschen repair/reparieren call/anrufen "
    "pick/abholen tidy/aufräumen switch/einschalten switch/ausschalten put/anziehen "
    "take/ausziehen bring/zurückbringen feed/füttern give/geben show/zeigen send/schicken "
    "bring/bringen help/helfen wait/warten explain/erklären return/zurückgeben put/legen "
    "put/stellen read/lesen write/schreiben go/gehen follow/folgen"
)


def simple(dice: Dice) -> Sentence:
    """One clause that says something."""
    return Sentence(clause(dice))


def question(dice: Dice) -> Sentence:
    """A question for yes or no."""
    tense = dice.weighted(((0.5, "present"), (0.25, "past"), (0.25, "perfect")))
    wish = Wish(tense=tense, negated=False, relative=False, front=False)
    while True:
        part = about_known(dice, wish)
        if part.subject and part.subject.head is not I:  # who laughs knows it
            return Sentence(part, "whether")


def inquiry(dice: Dice) -> Sentence:
    """A question led by a question word."""
    tense = dice.weighted(((0.6, "present"), (0.25, "past"), (0.15, "perfect")))
    wish = Wish(tense=tense, negated=False, relative=False, front=False)
    roll = dice.below(10)
    if roll < 2:
        part = clause(dice, replace(wish, subject=Phrase(HE), frame=dice.one(DEEDS)))
        return Sentence(replace(part, subject=None), "which", ("who", "wer"))
    if roll == 2:
        return Sentence(Clause(BE, _bare(_one(dice, _AGED))), "which", ("how old", "wie alt"))
    if roll == 3:
        return Sentence(Clause(COST, _one(dice, _WARES)), "which", ("how much", "wie viel"))
    word, part = asked(dice, replace(wish, modal=False))
    return Sentence(part, "which", word)


def _one(dice: Dice, pool: tuple[Noun, ...]) -> Phrase:
    """One thing that the hearer knows."""
    phrase = noun(dice, pool, subject=True, single=True)
    return phrase if phrase.definite else replace(phrase, determiner="the")


def _bare(phrase: Phrase) -> Phrase:
    """The phrase without its adjectives."""
    return replace(phrase, adjectives=(), degree=0)


def request(dice: Dice) -> Sentence:
    """A polite order: Please open the window."""
    wish = replace(PLAIN, subject=Phrase(YOU), frame=dice.one(_ORDERS), tense="future")
    part = clause(dice, wish)
    what = part.accusative
    if what and isinstance(what.head, Noun) and not what.definite and not what.head.mass:
        part = replace(part, accusative=replace(what, determiner="the"))
    if dice.chance(0.3):
        times = (("today", "heute"), ("tomorrow", "morgen"), ("now", "jetzt"), clock(dice))
        part = replace(part, time=dice.one(times))
    return Sentence(part, "order")


def described(dice: Dice) -> Sentence:
    """What somebody or something is, is like, or becomes."""
    roll = dice.below(10)
    tense = "past" if dice.chance(0.25) else "present"
    if roll < 2:
        return _profession(dice, tense)
    subject = _bare(noun(dice, _DESCRIBED, subject=True))
    if not subject.definite and not subject.count:
        subject = replace(subject, determiner="the")
    head = subject.head
    assert isinstance(head, Noun)
    compared = [a for a in BY_NOUN[head] if a.english[0] in COMPARED]
    if roll < 5 and compared and known(subject):
        return _comparison(dice, subject, tense)
    if roll == 5 and "person" in head.kinds:
        said = state(dice.one(("tired", "sick", "sad", "nervous")))
        part = Clause(BECOME, subject, tense, predicate=said, time=when(dice, tense))
        return Sentence(replace(part, front=dice.chance(0.5)))
    denied = known(subject) and dice.chance(0.2)
    return Sentence(Clause(BE, subject, tense, predicate=quality(dice, head), negated=denied))


def _profession(dice: Dice, tense: str) -> Sentence:
    """My brother is a doctor: Mein Bruder ist Arzt, with no article unless he is a good one."""
    job = dice.one(_JOBS)
    head = dice.one([n for n in _RELATIVES if n.pronoun == job.pronoun])
    who = Phrase(head, dice.one(("my", "your", "our", "his", "her", "their")))
    if dice.chance(0.3):
        who = Phrase(HE if job.pronoun == "he" else SHE)
    what = Phrase(job, "a")
    words = noun_phrase(what), job.singular[0]
    if dice.chance(0.5):
        praise = dice.one([a for a in BY_NOUN[job] if a.english[0] in _PRAISE])
        what = replace(what, adjectives=(praise,))
        words = noun_phrase(what), german.noun_phrase(what, german.NOMINATIVE)
    return Sentence(Clause(BE, who, tense, predicate=words))


def _comparison(dice: Dice, subject: Phrase, tense: str) -> Sentence:
    """Bigger than, größer als; as big as, so groß wie."""
    head = subject.head
    assert isinstance(head, Noun)
    adjective = dice.one([a for a in BY_NOUN[head] if a.english[0] in COMPARED])
    alike = [n for n in adjective.of if n is not head and n.kinds & head.kinds]
    alike.sort(key=lambda n: n.english)
    if not alike:
        return Sentence(Clause(BE, subject, tense, predicate=quality(dice, head)))
    other = noun(dice, tuple(alike), subject=True)
    other = replace(_bare(other), count=0)
    if not known(other):
        other = replace(other, determiner="this" if subject.determiner == "the" else "the")
    than = noun_phrase(other), german.noun_phrase(other, german.NOMINATIVE)
    if dice.chance(0.6):
        words = f"{adjective.english[1]} than {than[0]}", f"{adjective.german[1]} als {than[1]}"
    else:
        words = f"as {adjective.english[0]} as {than[0]}", f"so {adjective.german[0]} wie {than[1]}"
    return Sentence(Clause(BE, subject, tense, predicate=words))


def counted(dice: Dice) -> Sentence:
    """Prices, ages and inhabitants, in words."""
    roll = dice.below(3)
    if roll == 0:
        n = 2 + dice.below(98)
        if dice.chance(0.5):
            n *= 10 ** (1 + dice.below(3))
        price = f"{english_number(n)} euros", f"{german_number(n)} Euro"
        return Sentence(Clause(COST, _one(dice, _WARES), predicate=price))
    if roll == 1:
        n = 20 + dice.below(780)
        age = f"{english_number(n)} years old", f"{german_number(n)} Jahre alt"
        return Sentence(Clause(BE, _bare(_one(dice, _AGED)), predicate=age))
    place = _one(dice, _SETTLEMENTS)
    if place.head is NOUNS["village"]:
        n = 200 + dice.below(4800)
    else:
        n = (20 + dice.below(980)) * 1000
    people = f"{english_number(n)} inhabitants", f"{german_number(n)} Einwohner"
    return Sentence(Clause(HAVE, place, predicate=people))


def liked(dice: Dice) -> Sentence:
    """The weather, what somebody plays, and what somebody likes: the thing gefällt the person."""
    who = person(dice)
    tense = dice.weighted(((0.65, "present"), (0.35, "past")))
    denied = known(who) and dice.chance(0.2)
    roll = dice.below(6)
    if roll == 0:
        part = weather(dice, tense)
        if dice.chance(0.5):
            time = when(dice, tense, rare=True)
            part = replace(part, time=time, front=dice.chance(0.5))
        return Sentence(part)
    if roll < 4:
        thing = noun(dice, _LIKED, subject=True)
        if not thing.definite:
            thing = replace(thing, determiner="this", count=0)
        return Sentence(Clause(PLEASE, who, tense, accusative=thing, negated=denied, swapped=True))
    what = Phrase(dice.one(_INSTRUMENTS), "piano")
    part = Clause(PLAY, who, tense, accusative=what, negated=denied)
    if not denied and dice.chance(0.3):
        part = replace(part, modal=dice.one((CAN, MUST, SHOULD, LIKE)), tense="present")
    elif not denied and dice.chance(0.4):
        part = replace(part, time=when(dice, tense), front=dice.chance(0.5))
    return Sentence(part)


RULES: tuple[tuple[float, Callable[[Dice], Sentence]], ...] = (
    (0.31, simple), (0.09, explained), (0.04, conceded), (0.06, conditional), (0.1, reported),
    (0.07, question), (0.08, inquiry), (0.03, request), (0.04, attempted), (0.02, purposeful),
    (0.05, described), (0.03, counted), (0.02, joined), (0.03, sequenced), (0.03, liked),
)  # fmt: skip


def draw(dice: Dice) -> Sentence:
    """A sentence, of whatever kind."""
    return dice.weighted(RULES)(dice)
