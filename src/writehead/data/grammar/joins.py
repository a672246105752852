"""Choosing sentences of two clauses: reasons, conditions, reports, plans, and what came first."""

from dataclasses import replace

from writehead.data.grammar.clauses import PLAIN, Wish, clause, reason
from writehead.data.grammar.dice import Dice
from writehead.data.grammar.frames import (
    ASK,
    BE,
    BEGIN,
    BELIEVE,
    FORGET,
    FRAMES,
    HAVE,
    HOPE,
    KNOW,
    PLAN,
    PROMISE,
    RAIN,
    SAY,
    SHINE,
    SNOW,
    THINK,
    TRY,
)  # fmt: skip
from writehead.data.grammar.modifiers import ADJECTIVES, HOME_AT, HOME_TO, STATES, Pair
from writehead.data.grammar.nouns import NOUNS, Noun, nouns
from writehead.data.grammar.phrases import somebody, to
from writehead.data.grammar.tree import IT, WANT, WE, YOU, Clause, I, Phrase, Sentence
from writehead.data.grammar.verbs import Frame

PEOPLE = nouns("person")
ADULTS = nouns("adult")
VERBS = {frame.name.replace(" ", "-"): frame for frame in reversed(FRAMES)}
# what a person does on purpose
DEEDS = tuple(f for f in FRAMES if NOUNS["man"] in f.subject and not f.stative)
_IT = Phrase(IT["n"])
_STATES = tuple(sorted(STATES))
_BECAUSE, _ALTHOUGH, _IF = ("because", "weil"), ("although", "obwohl"), ("if", "wenn")


def verbs(names: str) -> tuple[Frame, ...]:
    """The frames of these names."""
    return tuple(VERBS[name] for name in names.split())


_HASTY = ("get", "hurry", "smile", "laugh", "cry", "run")
_LEISURELY = tuple(f for f in DEEDS if f.english.base not in _HASTY)
_COSTLY = verbs("buy/kaufen order/bestellen travel/reisen fly/fliegen")
_INDOORS = verbs(
    "stay/bleiben read/lesen cook/kochen bake/backen sleep/schlafen watch/fernsehen "
    "drink/trinken visit/besuchen tidy/aufräumen write/schreiben put/anziehen"
)
_OUTDOORS = verbs(
    "go/spazieren-gehen swim/schwimmen go/gehen drive/fahren wash/waschen paint/malen "
    "run/laufen work/arbeiten wait/warten feed/füttern"
)
_YOUTH = verbs("work/arbeiten travel/reisen dance/tanzen sing/singen live/wohnen")
_WAYS = verbs("go/gehen drive/fahren run/laufen")
# where one goes, and what for
_ERRANDS = (
    (nouns("'shop' 'market' 'city'"), verbs("buy/kaufen meet/treffen")),
    (nouns("'restaurant' 'hotel'"), verbs("eat/essen drink/trinken order/bestellen meet/treffen")),
    (nouns("'library' 'park'"), verbs("read/lesen write/schreiben")),
    (nouns("'park' 'forest'"), verbs("rest/ausruhen go/spazieren-gehen paint/malen")),
    (nouns("'station' 'airport'"), verbs("pick/abholen wait/warten meet/treffen")),
    (nouns("'office' 'hospital' 'school'"), verbs("help/helfen work/arbeiten")),
    (nouns("'village' 'city'"), verbs("visit/besuchen help/helfen repair/reparieren")),
)


# what people do when they are so
_IN_STATE = {
    word: [f for f in FRAMES if word in f.because and f.subject[0] in PEOPLE and not f.event]
    for word in _STATES
}


def state(word: str) -> Pair:
    """An adjective as a bare predicate in both languages."""
    adjective = ADJECTIVES[word]
    return adjective.english[0], adjective.german[0]


def person(dice: Dice) -> Phrase:
    """Somebody, to begin a sentence with."""
    return somebody(dice, PEOPLE)


def known(phrase: Phrase | None) -> bool:
    """Whether the hearer knows whom it means, so that one can ask and deny."""
    return phrase is not None and phrase.definite and phrase.determiner not in ("every", "all")


def weather(dice: Dice, tense: str = "present") -> Clause:
    """It rains, it snows, the sun shines."""
    verb = dice.one((RAIN, SNOW, SHINE))
    subject = Phrase(NOUNS["sun"], "the") if verb is SHINE else _IT
    return Clause(verb, subject, tense)


def explained(dice: Dice) -> Sentence:
    """A deed and its reason: because, weil."""
    while True:
        tense = "past" if dice.chance(0.3) else "present"
        main = clause(dice, Wish(tense=tense, negated=False, relative=dice.chance(0.3)))
        why = reason(dice, main) or _circumstance(dice, main)
        if why is not None:
            first = not main.front and _opens(why) and dice.chance(0.3)
            return Sentence(main, conjunction=_BECAUSE, second=why, reversed=first)


def _opens(part: Clause) -> bool:
    """Whether a clause can come first: its subject is no pronoun that looks back."""
    who = part.subject
    return who is not None and (who is _IT or who.head in (I, YOU, WE, NOUNS["sun"]))


def _circumstance(dice: Dice, main: Clause) -> Clause | None:
    """A reason that has little to do with the verb: weather, free time, a plan."""
    assert main.subject
    who = main.subject.pronoun()
    head = main.subject.head
    if who is None or (isinstance(head, Noun) and "person" not in head.kinds):
        return None
    tense = "past" if main.tense == "past" else "present"
    if main.direction is HOME_TO or main.place is HOME_AT:
        return Clause(dice.one((RAIN, SNOW)), _IT, tense)
    if main.modal or not dice.chance(0.2):
        return None
    if main.verb in _LEISURELY:
        return Clause(HAVE, who, tense, accusative=Phrase(NOUNS["time"]))
    return None


def conceded(dice: Dice) -> Sentence:
    """A deed in spite of something: although, obwohl."""
    tense = "past" if dice.chance(0.3) else "present"
    wish = Wish(tense=tense, negated=False, relative=False, front=False)
    if dice.chance(0.25):
        main = clause(dice, replace(wish, frame=dice.one(_OUTDOORS)))
        second = Clause(dice.one((RAIN, SNOW)), _IT, tense)
        return Sentence(main, conjunction=_ALTHOUGH, second=second, reversed=dice.chance(0.4))
    while True:
        frame = dice.one(DEEDS)
        main = clause(dice, replace(wish, frame=frame))
        assert main.subject
        who = main.subject.pronoun()
        allowed = [w for w in ("tired", "sick", "sad") if w not in frame.because]
        if isinstance(main.subject.head, Noun):
            allowed = [w for w in allowed if main.subject.head in ADJECTIVES[w].of]
        if who is not None and known(main.subject) and allowed:
            break
    main = replace(main, often=None)
    assert main.subject
    said = state(dice.one(allowed))
    if dice.chance(0.4) and not main.subject.pronominal:
        second = Clause(BE, main.subject, tense, predicate=said)
        main = replace(main, subject=who)
        return Sentence(main, conjunction=_ALTHOUGH, second=second, reversed=True)
    second = Clause(BE, who, tense, predicate=said)
    return Sentence(main, conjunction=_ALTHOUGH, second=second)


def conditional(dice: Dice) -> Sentence:
    """What is done if something holds: if, wenn."""
    who = person(dice)
    later = who.pronoun()
    wish = Wish(tense="present", negated=False, time=False, relative=False)
    roll = dice.below(3)
    if roll == 0 or later is None:
        condition = weather(dice)
        frame = dice.one(_OUTDOORS if condition.verb is SHINE else _INDOORS)
        main = clause(dice, replace(wish, frame=frame))
        return Sentence(main, conjunction=_IF, second=condition, reversed=dice.chance(0.6))
    if roll == 1:
        rich = dice.chance(0.4)
        condition = Clause(HAVE, who, accusative=Phrase(NOUNS["money" if rich else "time"]))
        frame = dice.one(_COSTLY if rich else _LEISURELY)
    else:
        word = dice.one(_STATES)
        condition = Clause(BE, who, predicate=state(word))
        frame = dice.one(
            [f for f in FRAMES if word in f.because and f.subject[0] in PEOPLE and not f.event]
        )
    if dice.chance(0.6):
        main = replace(clause(dice, replace(wish, subject=later, frame=frame)), often=None)
        return Sentence(main, conjunction=_IF, second=condition, reversed=True)
    main = replace(clause(dice, replace(wish, subject=who, frame=frame)), often=None)
    return Sentence(main, conjunction=_IF, second=replace(condition, subject=later))


def reported(dice: Dice) -> Sentence:
    """What somebody knows, hopes, says or asks: that, whether, where."""
    who = somebody(dice, ADULTS)
    tense = "past" if dice.chance(0.25) else "present"
    roll = dice.below(10)
    inner = Wish(front=False, relative=False, tense="past" if tense == "past" else None)
    if roll < 6:
        verb = dice.one((KNOW, BELIEVE, HOPE, SAY, THINK))
        part = _of_another(dice, replace(inner, modal=False if verb is HOPE else None), who)
        return Sentence(Clause(verb, who, tense), conjunction=("that", "dass"), second=part)
    if known(who) and dice.chance(0.5):
        main = Clause(KNOW, who, tense, negated=True)
    else:
        main = Clause(ASK, who, tense)
    if roll < 8:
        part = replace(_of_another(dice, replace(inner, negated=False), who), often=None)
        return Sentence(main, conjunction=("whether", "ob"), second=part)
    word, part = asked(dice, replace(PLAIN, tense=tense))
    return Sentence(main, conjunction=word, second=part)


def _of_another(dice: Dice, wish: Wish, who: Phrase) -> Clause:
    """A clause whose subject is not the noun that reports it."""
    while True:
        part = clause(dice, wish)
        if part.subject and (part.subject.pronominal or part.subject.head is not who.head):
            return part


def asked(dice: Dice, wish: Wish) -> tuple[Pair, Clause]:
    """A question word and the clause that lacks its answer."""
    part = replace(about_known(dice, replace(wish, front=False, relative=False)), often=None)
    frame, what = part.verb, part.accusative
    if frame.place == "from":
        return ("where", "woher"), replace(part, direction=None)
    if frame.place in ("to", "abroad") and dice.chance(0.6):
        return ("where", "wohin"), replace(part, direction=None, manner=None)
    if part.place and frame.place != "on" and dice.chance(0.6):
        return ("where", "wo"), replace(part, place=None, manner=None)
    thing = what is not None and isinstance(what.head, Noun) and "person" not in what.head.kinds
    if thing and frame.place != "put" and dice.chance(0.5):
        return ("what", "was"), replace(part, accusative=None, manner=None)
    if part.dative and not what and not frame.english.fixed and dice.chance(0.5):
        return ("whom", "wem"), replace(part, dative=None)
    if frame.state or part.tense in ("perfect", "since") or dice.chance(0.5):
        return ("why", "warum"), part
    return ("when", "wann"), replace(part, time=None, manner=None)


def about_known(dice: Dice, wish: Wish) -> Clause:
    """A clause whose subject the hearer knows: one asks nothing about "a woman"."""
    while True:
        part = clause(dice, wish)
        if known(part.subject):
            return part


def attempted(dice: Dice) -> Sentence:
    """Something tried, planned or promised: to read, zu lesen."""
    verb = dice.one((TRY, TRY, BEGIN, PLAN, PROMISE, FORGET))
    who = person(dice)
    tense = dice.weighted(((0.45, "present"), (0.3, "past"), (0.25, "perfect")))
    part = clause(dice, replace(PLAIN, subject=who, tense="future", frame=dice.one(DEEDS)))
    part = replace(part, subject=None, often=None, manner=None)
    return Sentence(Clause(verb, who, tense, infinitive=part))


def purposeful(dice: Dice) -> Sentence:
    """A way gone for a purpose: in order to, um … zu."""
    wish = Wish(frame=dice.one(_WAYS), negated=False, relative=False)
    main = clause(dice, replace(wish, subject=somebody(dice, ADULTS)))
    goals, frames = dice.one(_ERRANDS)
    wish = replace(PLAIN, subject=main.subject, tense="future", frame=dice.one(frames))
    part = replace(clause(dice, wish), subject=None, often=None, manner=None, place=None)
    return Sentence(replace(main, direction=to(dice, goals), purpose=part))


def joined(dice: Dice) -> Sentence:
    """Two main clauses: and, und; but, aber."""
    tense = "past" if dice.chance(0.35) else "present"
    wish = Wish(tense=tense, modal=False, time=False, negated=False, relative=False)
    who = person(dice)
    later = who.pronoun()
    if later is None or not known(who) or dice.chance(0.4):
        one = clause(dice, replace(wish, subject=who))
        two = clause(dice, replace(wish, subject=person(dice)))
        return Sentence(one, conjunction=("and", "und"), second=two, coordinated=True)
    main = clause(dice, replace(wish, subject=who, frame=dice.one(DEEDS)))
    lacking = Phrase(NOUNS["money" if main.verb in _COSTLY else "time"])
    second = Clause(HAVE, later, main.tense, accusative=lacking, negated=True)
    if dice.chance(0.5):
        second = Clause(BE, later, main.tense, predicate=state(dice.one(("tired", "sick"))))
    main = replace(main, modal=WANT, often=None)
    return Sentence(main, conjunction=("but", "aber"), second=second, coordinated=True)


def sequenced(dice: Dice) -> Sentence:
    """Two deeds in time: when, before, after, while."""
    who = person(dice)
    later = who.pronoun()
    wish = replace(PLAIN, tense="past")
    deeds = tuple(f for f in DEEDS if not f.english.timeless)
    roll = dice.below(4)
    if later is None or not known(who) or roll == 0:
        one = clause(dice, replace(wish, subject=who, frame=dice.one(deeds)))
        two = clause(dice, replace(wish, frame=dice.one(deeds)))
        first = dice.chance(0.6)
        return Sentence(two, conjunction=("while", "während"), second=one, reversed=first)
    main = clause(dice, replace(wish, subject=later, frame=dice.one(deeds)))
    if roll == 1:
        second = Clause(VERBS["come/kommen"], who, "past", direction=HOME_TO)
        if dice.chance(0.3):
            second = Clause(BE, who, "past", predicate=state("young"))
            main = clause(dice, replace(wish, subject=later, frame=dice.one(_YOUTH)))
        return Sentence(main, conjunction=("when", "als"), second=second, reversed=True)
    second = clause(dice, replace(wish, subject=who, frame=dice.one(deeds)))
    if roll == 2:
        return Sentence(main, conjunction=("before", "bevor"), second=second, reversed=True)
    second = replace(second, tense="pluperfect")
    return Sentence(main, conjunction=("after", "nachdem"), second=second, reversed=True)
