"""Draws random sentences and their translations, one function per construction."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from writehead.data.corpus import english, german, lexicon, syntax
from writehead.data.corpus.lexicon import ADJECTIVES, NOUNS, VERBS, Noun, Pair, Verb, nouns
from writehead.data.corpus.syntax import PRONOUNS, Clause, NounPhrase, Pronoun

T = TypeVar("T")
Drawn = tuple[str, str, str]  # English, German, final punctuation mark

_VERBS = tuple(verb for verb in VERBS if verb.subjects)
_NAMED = {verb.german.infinitive: verb for verb in VERBS if not verb.subjects}
_NAMES, _PEOPLE, _PERSON = nouns("name"), nouns("person"), NOUNS["woman"]
_KNOWN: tuple[Noun | Pronoun, ...] = (*PRONOUNS, *_NAMES)
_ADJECTIVES = {
    noun: tuple(word for word in ADJECTIVES.values() if word.kinds & noun.kinds)
    for noun in NOUNS.values()
    if noun not in _NAMES
}
_DESCRIBED = tuple(noun for noun, adjectives in _ADJECTIVES.items() if adjectives)
_BY_SUBJECT = {noun: tuple(v for v in _VERBS if noun in v.subjects) for noun in NOUNS.values()}
_ACTIONS = tuple(verb for verb in _BY_SUBJECT[_PERSON] if not (verb.state or verb.event))

# repeated by frequency
_TENSES = (
    ["present"] * 7 + ["past"] * 6 + ["perfect"] * 3 + ["future"] * 3 + ["progressive"] * 2
)  # fmt: skip
_DETERMINERS = ["the"] * 5 + ["a"] * 2 + ["my"] * 2 + ["this"]
# by the kind of noun: the prepositions of a place, and the German one of a destination
_PLACES = {
    "in": ("in", "in", "in", lexicon.ACCUSATIVE),
    "at": ("at", "an", "zu", lexicon.DATIVE),
    "on": ("on", "auf", "auf", lexicon.ACCUSATIVE),
}
# the verb of the first clause (any if empty), the conjunctions, the tense (any if empty)
_CONJUNCTIONS = (
    ("", "because", "weil", ""),
    ("", "if", "wenn", "present"),
    ("", "when", "als", "past"),
    ("", "and", "und", ""),
    ("", "but", "aber", ""),
    ("wissen", "that", "dass", ""),
    ("sagen", "that", "dass", ""),
)


class Dice:
    """Random choices from uniform floats, which are the same in every version of Python."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed).random

    def chance(self, probability: float) -> bool:
        """Returns true with this probability."""
        return self._random() < probability

    def choice(self, options: Sequence[T]) -> T:
        """Returns one of the options, all with equal probability."""
        return options[int(self._random() * len(options))]


def _noun_phrase(dice: Dice, head: Noun, subject: NounPhrase | None = None) -> NounPhrase:
    """Draws a phrase about a noun; a possessive often refers to the `subject` of the clause."""
    determiner, count = dice.choice(_DETERMINERS), None
    plural = bool(head.german_plural) and dice.chance(0.3)
    if determiner == "my" or "family" in head.kinds:
        pronoun = subject.pronoun() if subject and dice.chance(0.7) else None
        determiner = pronoun.possessive if pronoun else ""
        determiner = determiner or dice.choice(PRONOUNS).possessive
    elif plural and dice.chance(0.3):
        determiner, count = dice.choice(("", "the")), dice.choice(lexicon.PHRASES["number"])
    elif determiner == "a" and not head.german_plural:
        determiner = ""
    return NounPhrase(head, determiner, plural, count, _adjective(dice, head, 0.3))


def _adjective(dice: Dice, head: Noun, probability: float) -> lexicon.Adjective | None:
    fitting = _ADJECTIVES[head]
    return dice.choice(fitting) if fitting and dice.chance(probability) else None


def _subject(dice: Dice, fillers: tuple[Noun, ...]) -> NounPhrase:
    if _PERSON in fillers and dice.chance(0.4):
        return NounPhrase(dice.choice(_KNOWN))
    return _noun_phrase(dice, dice.choice(fillers))


def _object(dice: Dice, fillers: tuple[Noun, ...], subject: NounPhrase) -> NounPhrase | None:
    """Draws an object that is not the subject itself."""
    if not fillers:
        return None
    same = (syntax.I, syntax.WE) if subject.head in (syntax.I, syntax.WE) else (subject.head,)
    if _PERSON in fillers and dice.chance(0.25):
        return NounPhrase(dice.choice([head for head in _KNOWN if head not in same]))
    return _noun_phrase(dice, dice.choice([noun for noun in fillers if noun not in same]), subject)


def _place(dice: Dice, verb: Verb) -> Pair:
    """Draws a place, or a destination if the verb takes one."""
    to = verb.place == "to"
    if NOUNS["city"] in verb.places and dice.chance(0.25):
        name, german_name = dice.choice(lexicon.PHRASES["city"])
        return (f"to {name}", f"nach {german_name}") if to else (f"in {name}", f"in {german_name}")
    head = dice.choice(verb.places)
    determiner = dice.choice(("the", "the", "the", "the", "this", "a"))
    phrase = NounPhrase(head, determiner, adjective=_adjective(dice, head, 0.2))
    kind = next(kind for kind in _PLACES if kind in head.kinds)
    word, german_word, german_to, case = _PLACES[kind]
    text = english.noun_phrase(phrase)
    if to:
        return f"to {text}", german.prepositional(german_to, phrase, case)
    return f"{word} {text}", german.prepositional(german_word, phrase, lexicon.DATIVE)


def _time(dice: Dice, tense: str) -> Pair:
    day, german_day = dice.choice(lexicon.PHRASES["day"])
    word, german_word = dice.choice(lexicon.PHRASES["number"])
    times = [(f"on {day}", f"am {german_day}"), (f"at {word} o'clock", f"um {german_word} Uhr")]
    if tense == "past":
        times.append((f"{word} days ago", f"vor {german_word} Tagen"))
    elif tense == "future":
        times.append((f"in {word} days", f"in {german_word} Tagen"))
    return dice.choice((*times, *lexicon.PHRASES[tense]))


def _clause(
    dice: Dice,
    verb: Verb | None = None,
    subject: NounPhrase | None = None,
    *,
    tense: str = "",
    plain: bool = False,
) -> Clause:
    """Draws a clause; a `plain` one has no modal, no negation and no optional adverbials."""
    verb = verb or dice.choice(_VERBS)
    subject = subject or _subject(dice, verb.subjects)
    part = Clause(
        verb,
        subject,
        _suitable_tense(verb, subject, tense or dice.choice(_TENSES)),
        accusative=_object(dice, verb.accusatives, subject),
        dative=_object(dice, verb.datives, subject),
        prepositional=_object(dice, verb.prepositionals, subject),
        place=_place(dice, verb) if verb.place in ("at", "to") else None,
    )
    return part if plain else _with_adverbials(dice, _negated(dice, _with_modal(dice, part)))


def _suitable_tense(verb: Verb, subject: NounPhrase, tense: str) -> str:
    """Returns the tense, or another one if the verb lacks it or would be ambiguous in it."""
    if verb.state and tense not in ("present", "past"):
        return "present"
    if verb.event and tense == "progressive":
        return "past"
    same_form = verb.english.base == verb.english.past and subject.person != syntax.THIRD
    return "perfect" if tense == "past" and same_form else tense  # "they read"


def _with_modal(dice: Dice, part: Clause) -> Clause:
    if part.verb not in _ACTIONS or part.tense not in ("present", "past") or dice.chance(0.75):
        return part
    modal = dice.choice(syntax.MODALS)
    return replace(part, modal=modal, tense=part.tense if modal.english[2] else "present")


def _negated(dice: Dice, part: Clause) -> Clause:
    """Returns the clause, sometimes negated if "not" is unambiguous in it."""
    participants = (part.subject, part.dative, part.prepositional)
    definite = all(phrase.is_definite for phrase in participants if phrase)
    if not definite or (part.accusative and part.accusative.count) or dice.chance(0.85):
        return part
    modal = syntax.MUST_NOT if part.modal is syntax.MUST else part.modal
    return replace(part, negated=True, modal=modal)


def _with_adverbials(dice: Dice, part: Clause) -> Clause:
    """Returns the clause, sometimes with a place and a time."""
    if part.verb.place == "in" and dice.chance(0.35):
        part = replace(part, place=_place(dice, part.verb))
    if part.verb.state or part.tense not in ("present", "past", "future"):
        return part
    if dice.chance(0.35):
        return replace(part, time=_time(dice, part.tense), time_first=dice.chance(0.4))
    return part


def _main(part: Clause) -> Drawn:
    return english.clause(part), german.clause(part, "second"), "."


def _statement(dice: Dice) -> Drawn:
    return _main(_clause(dice))


def _yes_no_question(dice: Dice) -> Drawn:
    part = replace(_clause(dice), time_first=False)
    return english.clause(part, inverted=True), german.clause(part, "first"), "?"


def _wh_question(dice: Dice) -> Drawn:
    part = replace(_clause(dice), time_first=False)
    verb = part.verb
    questions = [("why", "warum", part)]
    if verb.place in ("in", "at"):
        questions.append(("where", "wo", replace(part, place=None)))
    if _PERSON in verb.subjects:
        questions.append(("who", "wer", replace(part, subject=None)))
    if part.accusative:
        words = ("whom", "wen") if _PERSON in verb.accusatives else ("what", "was")
        questions.append((*words, replace(part, accusative=None)))
    word, german_word, part = dice.choice(questions)
    source = english.clause(part, lead=word, inverted=part.subject is not None)
    return source, german.clause(part, "first", lead=german_word), "?"


def _request(dice: Dice) -> Drawn:
    you = NounPhrase(syntax.YOU)
    part = _clause(dice, dice.choice(_ACTIONS), you, tense="present", plain=True)
    return f"please {english.infinitive(part)}", german.clause(part, "first", lead="bitte"), "."


def _quality(dice: Dice) -> Drawn:
    """Draws a sentence such as "X is old." or "Was X old?"."""
    head = dice.choice(_DESCRIBED)
    subject = replace(_noun_phrase(dice, head), adjective=None)
    if not subject.is_definite:
        subject = replace(subject, determiner="the")
    adjective = dice.choice(_ADJECTIVES[head])
    tense, predicate = dice.choice(("present", "past")), (adjective.english, adjective.german)
    part = _negated(dice, Clause(_NAMED["sein"], subject, tense, predicate=predicate))
    if dice.chance(0.2):
        return english.clause(part, inverted=True), german.clause(part, "first"), "?"
    return _main(part)


def _two_clauses(dice: Dice) -> Drawn:
    """Draws two main clauses, or a main and a subordinate clause in either order."""
    word, conjunction, german_conjunction, tense = dice.choice(_CONJUNCTIONS)
    if word:
        second = replace(_clause(dice), time_first=False)
        tense = "past" if second.tense == "past" else "present"
        first = Clause(_NAMED[word], _subject(dice, _PEOPLE), tense)
    else:
        tense = tense or dice.choice(("present", "past"))
        first = _clause(dice, tense=tense, plain=True)
        second = _second_clause(dice, first, tense)
    coordinated = conjunction in ("and", "but")
    if not (word or coordinated) and dice.chance(0.3):
        source = f"{english.clause(first, lead=conjunction)}, {english.clause(second)}"
        target = german.clause(first, "last", lead=german_conjunction)
        return source, f"{target}, {german.clause(second, 'first')}", "."
    source = english.clause(first) + ("," if coordinated else "")
    target = german.clause(first, "second") + ("" if conjunction == "and" else ",")
    order = "second" if coordinated else "last"
    return (
        f"{source} {english.clause(second, lead=conjunction)}",
        f"{target} {german.clause(second, order, lead=german_conjunction)}",
        ".",
    )


def _second_clause(dice: Dice, first: Clause, tense: str) -> Clause:
    """Draws a clause about the subject of the first one, or about the weather."""
    assert first.subject
    head, pronoun = first.subject.head, first.subject.pronoun()
    if not pronoun or dice.chance(0.2):
        return Clause(_NAMED["regnen"], NounPhrase(syntax.IT["n"]), tense)
    noun = _PERSON if isinstance(head, Pronoun) or head in _NAMES else head
    verb = dice.choice(_BY_SUBJECT[noun])
    return _clause(dice, verb, NounPhrase(pronoun), tense=tense, plain=True)


def _infinitive(dice: Dice) -> Drawn:
    """Draws a sentence such as "Somebody tries to …"."""
    tense = dice.choice(("present", "past", "perfect"))
    main = Clause(_NAMED["versuchen"], _subject(dice, _PEOPLE), tense)
    options = [verb for verb in _ACTIONS if verb.place != "to"]
    part = _clause(dice, dice.choice(options), main.subject, tense="present", plain=True)
    return _main(replace(main, infinitive=part))


_CONSTRUCTIONS = (
    [_statement] * 20 + [_yes_no_question] * 5 + [_wh_question] * 5 + [_request] * 2
    + [_quality] * 5 + [_two_clauses] * 9 + [_infinitive] * 3
)  # fmt: skip


def draw(dice: Dice) -> Pair:
    """Draws a random sentence and its translation."""
    source, target, mark = dice.choice(_CONSTRUCTIONS)(dice)
    return source[0].upper() + source[1:] + mark, target[0].upper() + target[1:] + mark
