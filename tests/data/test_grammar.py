"""The embedded corpus, held against tables and sentences written by hand."""

import hashlib
import re
from collections import defaultdict
from dataclasses import replace

import pytest

from writehead.data.grammar import SPLITS, english, german, pairs, split_of
from writehead.data.grammar.dice import Dice
from writehead.data.grammar.frames import FRAMES, OTHERS
from writehead.data.grammar.joins import VERBS
from writehead.data.grammar.modifiers import ADJECTIVES, HOME_TO, MANNER
from writehead.data.grammar.nouns import NAMES, NOUNS, nouns
from writehead.data.grammar.numbers import german_number
from writehead.data.grammar.sentences import RULES, draw
from writehead.data.grammar.tree import (
    CAN,
    HE,
    IT,
    LIKE,
    MUST,
    WANT,
    WE,
    Clause,
    I,
    Phrase,
    Relative,
    Sentence,
)
from writehead.errors import DataError

BE = next(frame for frame in OTHERS if frame.english.base == "be")
LIKES = next(frame for frame in OTHERS if frame.german.infinitive == "gefallen")
TRY = next(frame for frame in OTHERS if frame.german.infinitive == "versuchen")


def the(noun: str, **rest) -> Phrase:
    return Phrase(NOUNS[noun], "the", **rest)


def a(noun: str, **rest) -> Phrase:
    return Phrase(NOUNS[noun], "a", **rest)


def adjective(word: str):
    return (ADJECTIVES[word],)


def spoken(value) -> str:
    return value if type(value) is str else ""


WAITING = Relative(Clause(VERBS["wait/warten"], Phrase(HE)), "about")
SINGING = Relative(Clause(VERBS["sing/singen"], None), "nominative")
HELPING = Relative(Clause(VERBS["help/helfen"], Phrase(I)), "dative")
SEEING = Relative(Clause(VERBS["see/sehen"], Phrase(I)), "accusative")
LIVING = Relative(Clause(VERBS["live/wohnen"], Phrase(I)), "place", ("in", "in"))
WHOSE = Relative(
    Clause(BE, Phrase(NOUNS["dog"], "whose"), predicate=("old", "alt")), "whose"
)  # fmt: skip

RELATIVES = [
    ("man", False, SINGING, "who sings", "der singt"),
    ("woman", False, SINGING, "who sings", "die singt"),
    ("girl", False, SINGING, "who sings", "das singt"),
    ("girl", True, SINGING, "who sing", "die singen"),
    ("bird", False, SINGING, "that sings", "der singt"),
    ("man", False, SEEING, "whom I see", "den ich sehe"),
    ("car", False, SEEING, "that I see", "das ich sehe"),
    ("man", False, HELPING, "whom I help", "dem ich helfe"),
    ("woman", False, HELPING, "whom I help", "der ich helfe"),
    ("child", True, HELPING, "whom I help", "denen ich helfe"),
    ("woman", False, WAITING, "for whom he waits", "auf die er wartet"),
    ("letter", False, WAITING, "for which he waits", "auf den er wartet"),
    ("house", False, LIVING, "in which I live", "in dem ich wohne"),
    ("city", False, LIVING, "in which I live", "in der ich wohne"),
    ("man", False, WHOSE, "whose dog is old", "dessen Hund alt ist"),
    ("woman", False, WHOSE, "whose dog is old", "deren Hund alt ist"),
    ("child", True, WHOSE, "whose dog is old", "deren Hund alt ist"),
]


@pytest.mark.parametrize(("noun", "plural", "part", "in_english", "in_german"), RELATIVES)
def test_relative_pronouns_agree(noun, plural, part, in_english, in_german):
    about = the(noun, plural=plural)
    assert english.relative(part, about) == in_english
    assert german.relative(part, about) == in_german


TEACHER = the("teacher", adjectives=adjective("young"))
APPLE = a("apple", adjectives=adjective("red"))
GIVE = Clause(VERBS["give/geben"], TEACHER, dative=the("child"), accusative=APPLE)
CALL = Clause(VERBS["call/anrufen"], the("woman"), accusative=the("doctor"))
READ = Clause(VERBS["read/lesen"], Phrase(HE), accusative=the("book"))
DRINK = Clause(VERBS["drink/trinken"], Phrase(I), accusative=Phrase(NOUNS["tea"]))
GET_UP = Clause(VERBS["get/aufstehen"], Phrase(HE))
HURRY = Clause(VERBS["hurry/beeilen"], the("man"))
WALK = Clause(VERBS["go/spazieren-gehen"], the("boy"))
PUT_ON = Clause(VERBS["put/anziehen"], the("girl"), accusative=Phrase(IT["m"]))
TODAY = ("today", "heute")
MORNING = ("in the morning", "am Morgen")
SEAT = ("in the garden", "im Garten")


SENTENCES = [
    (
        Sentence(GIVE),
        "The young teacher gives the child a red apple.",
        "Der junge Lehrer gibt dem Kind einen roten Apfel.",
    ),
    (
        Sentence(replace(GIVE, time=TODAY, front=True)),
        "Today the young teacher gives the child a red apple.",
        "Heute gibt der junge Lehrer dem Kind einen roten Apfel.",
    ),
    (
        Sentence(replace(GIVE, dative=Phrase(HE), accusative=Phrase(IT["m"]))),
        "The young teacher gives it to him.",
        "Der junge Lehrer gibt ihn ihm.",
    ),
    (
        Sentence(replace(GIVE, subject=the("man", relative=SINGING))),
        "The man who sings gives the child a red apple.",
        "Der Mann, der singt, gibt dem Kind einen roten Apfel.",
    ),
    (
        Sentence(replace(CALL, tense="perfect", accusative=the("doctor", relative=HELPING))),
        "The woman has called the doctor whom I help.",
        "Die Frau hat den Arzt angerufen, dem ich helfe.",
    ),
    (
        Sentence(replace(CALL, time=MORNING, front=True)),
        "In the morning, the woman calls the doctor.",
        "Am Morgen ruft die Frau den Arzt an.",
    ),
    (
        Sentence(replace(CALL, modal=MUST, time=TODAY)),
        "The woman must call the doctor today.",
        "Die Frau muss heute den Arzt anrufen.",
    ),
    (
        Sentence(replace(CALL, modal=MUST, negated=True)),
        "The woman must not call the doctor.",
        "Die Frau darf den Arzt nicht anrufen.",
    ),
    (
        Sentence(replace(CALL, modal=MUST, tense="past"), "whether"),
        "Did the woman have to call the doctor?",
        "Musste die Frau den Arzt anrufen?",
    ),
    (
        Sentence(replace(READ, tense="progressive", place=SEAT)),
        "He is reading the book in the garden.",
        "Er liest gerade das Buch im Garten.",
    ),
    (
        Sentence(
            replace(READ, tense="future", time=("tomorrow", "morgen"), manner=MANNER["slowly"])
        ),
        "He will read the book slowly tomorrow.",
        "Er wird morgen das Buch langsam lesen.",
    ),
    (
        Sentence(replace(READ, accusative=a("book"), place=SEAT, time=TODAY)),
        "He reads a book in the garden today.",
        "Er liest heute im Garten ein Buch.",
    ),
    (
        Sentence(replace(READ, negated=True, time=TODAY)),
        "He does not read the book today.",
        "Er liest das Buch heute nicht.",
    ),
    (
        Sentence(replace(READ, negated=True, accusative=a("book"))),
        "He does not read a book.",
        "Er liest kein Buch.",
    ),
    (
        Sentence(replace(READ, negated=True, accusative=a("book", plural=True), modal=CAN)),
        "He cannot read books.",
        "Er kann keine Bücher lesen.",
    ),
    (Sentence(replace(DRINK, modal=LIKE)), "I like to drink tea.", "Ich trinke gern Tee."),
    (
        Sentence(replace(DRINK, modal=LIKE, negated=True)),
        "I do not like to drink tea.",
        "Ich trinke nicht gern Tee.",
    ),
    (
        Sentence(replace(DRINK, subject=Phrase(HE), modal=WANT), "whether"),
        "Does he want to drink tea?",
        "Will er Tee trinken?",
    ),
    (
        Sentence(DRINK, conjunction=("because", "weil"), second=GET_UP),
        "I drink tea because he gets up.",
        "Ich trinke Tee, weil er aufsteht.",
    ),
    (
        Sentence(DRINK, conjunction=("if", "wenn"), second=WALK, reversed=True),
        "If the boy goes for a walk, I drink tea.",
        "Wenn der Junge spazieren geht, trinke ich Tee.",
    ),
    (
        Sentence(Clause(TRY, Phrase(I), "perfect", infinitive=replace(GET_UP, subject=None))),
        "I have tried to get up.",
        "Ich habe versucht, aufzustehen.",
    ),
    (
        Sentence(Clause(TRY, Phrase(I), infinitive=replace(HURRY, subject=None))),
        "I try to hurry.",
        "Ich versuche, mich zu beeilen.",
    ),
    (
        Sentence(replace(HURRY, time=TODAY, front=True)),
        "Today the man hurries.",
        "Heute beeilt sich der Mann.",
    ),
    (
        Sentence(DRINK, conjunction=("although", "obwohl"), second=replace(CALL, tense="perfect")),
        "I drink tea although the woman has called the doctor.",
        "Ich trinke Tee, obwohl die Frau den Arzt angerufen hat.",
    ),
    (Sentence(PUT_ON), "The girl puts it on.", "Das Mädchen zieht ihn an."),
    (
        Sentence(replace(WALK, tense="perfect")),
        "The boy has gone for a walk.",
        "Der Junge ist spazieren gegangen.",
    ),
    (
        Sentence(replace(CALL, accusative=None), "which", ("whom", "wen")),
        "Whom does the woman call?",
        "Wen ruft die Frau an?",
    ),
    (
        Sentence(replace(READ, subject=None, tense="past"), "which", ("who", "wer")),
        "Who read the book?",
        "Wer las das Buch?",
    ),
    (
        Sentence(replace(CALL, subject=None, time=TODAY), "order"),
        "Please call the doctor today.",
        "Bitte rufen Sie heute den Arzt an.",
    ),
    (
        Sentence(Clause(LIKES, Phrase(I), accusative=the("picture"), swapped=True, negated=True)),
        "I do not like the picture.",
        "Das Bild gefällt mir nicht.",
    ),
    (
        Sentence(
            Clause(VERBS["drive/fahren"], Phrase(WE, plural=True), direction=HOME_TO, time=TODAY),
            conjunction=("but", "aber"),
            second=Clause(BE, Phrase(HE), "past", predicate=("sick", "krank")),
            coordinated=True,
        ),
        "We drive home today, but he was sick.",
        "Wir fahren heute nach Hause, aber er war krank.",
    ),
]


@pytest.mark.parametrize(
    ("tree", "in_english", "in_german"), SENTENCES, ids=lambda x: x if type(x) is str else ""
)
def test_words_stand_where_a_speaker_puts_them(tree, in_english, in_german):
    assert english.sentence(tree) == in_english
    assert german.sentence(tree) == in_german


@pytest.fixture(scope="module")
def train():
    return list(pairs("train", 20_000))


def test_the_splits_share_no_sentence_in_either_language():
    """Sentences of all splits, as they are drawn: whatever reads the same has one split."""
    dice, said, splits = Dice("splits"), defaultdict(set), defaultdict(set)
    for _ in range(60_000):
        tree = draw(dice)
        source, target = english.sentence(tree), german.sentence(tree)
        said[target.lower()].add(source.lower())
        splits[source.lower()].add(split_of(source))
    assert set.union(*splits.values()) == set(SPLITS)
    assert max(map(len, splits.values())) == 1
    alike = [sources for sources in said.values() if len(sources) > 1]
    assert len(alike) > 50  # which could have gone apart
    for sources in alike:
        assert len(set.union(*(splits[source] for source in sources))) == 1, sources


def test_words_that_german_does_not_tell_apart_share_a_split():
    for noun in NOUNS:
        tall, big = (
            Sentence(replace(CALL, subject=the(noun, adjectives=adjective(word))))
            for word in ("tall", "big")
        )
        assert german.sentence(tall) == german.sentence(big)
        assert split_of(english.sentence(tall)) == split_of(english.sentence(big))


def test_pairs_are_of_the_split_that_was_asked_for(train):
    corpus = {"train": train} | {split: list(pairs(split, 1000)) for split in ("dev", "test")}
    assert corpus.keys() == SPLITS.keys()
    for split, drawn in corpus.items():
        assert {split_of(source) for source, _ in drawn} == {split}
        assert len({source for source, _ in drawn}) == len(drawn)


def test_no_pair_comes_twice_and_english_decides_the_german(train):
    known = dict(train)
    assert len(known) == len(train)
    # another seed draws other sentences: there are far more than we have seen
    again = list(pairs("train", 5_000, seed=1))
    assert sum(source in known for source, _ in again) < 0.15 * len(again)
    for source, target in again:
        assert known.get(source, target) == target


def test_sentences_are_spelt_with_care(train):
    for source, target in train:
        for text in (source, target):
            assert re.fullmatch(r"[A-ZÄÖÜ][^.?]*[.?]", text), text
            assert not re.search(r"  | [,.?]|,,|,[.?]|[^\w ,.?'-]|_", text), text
        assert source[-1] == target[-1]
        assert not re.search(r"\ban [^aeiou]", source), source
        assert not re.search(r"\ba [aeio]", source), source
        assert not re.search(r"\b(in dem|in das|zu dem|zu der|an dem|von dem) [A-Z]\w+[.?]", target)


def test_german_nouns_begin_with_a_capital(train):
    forms = {form for noun in NOUNS.values() for form in (*noun.singular, *noun.plural)}
    other_words = {"junge", "jungen", "schloss", "sprachen"}  # young, closed, spoke
    lower = {form.lower() for form in forms} - other_words
    for _, target in train:
        for word in re.findall(r"\w+", target):
            assert not (word in lower and word[0].islower()), target


def test_lengths_and_vocabulary_stay_within_bounds(train):
    lengths = [len(source.split()) for source, _ in train]
    assert min(lengths) >= 2
    assert max(lengths) <= 30
    assert 7 < sum(lengths) / len(lengths) < 11
    count = {side: set() for side in (0, 1)}
    for pair in train:
        for side in (0, 1):
            count[side].update(re.findall(r"[\w-]+", pair[side].lower()))
    spelt = {german_number(n) for n in range(1_000_000) if n < 1000 or n % 1000 == 0}
    plain = {w for w in count[1] - spelt if not re.search("tausend|hundert", w)}
    assert 600 < len(count[0]) < 1200
    assert 900 < len(plain) < 1800


def test_every_word_of_the_lexicon_is_used(train):
    words = [set(), set()]
    for pair in train:
        for side in (0, 1):
            words[side].update(re.findall(r"[\w]+", pair[side].lower()))
    for noun in NOUNS.values():
        assert set(noun.english.split()) <= words[0], noun.english
        assert {form.lower() for form in noun.singular[:3]} <= words[1], noun.singular
    for word in ADJECTIVES:
        assert word in words[0], word
    for name, _ in NAMES:
        assert name.lower() in words[1]
    for frame in (*FRAMES, *OTHERS):
        verb = frame.english
        assert {verb.base, verb.third, verb.past} & words[0], frame.name
        assert {frame.german.third, frame.german.perfect, frame.german.past} & words[1], frame.name


def test_every_kind_of_sentence_is_drawn():
    dice = Dice("kinds")
    assert sum(weight for weight, _ in RULES) == pytest.approx(1)
    kinds = {draw(dice).kind for _ in range(500)}
    assert kinds == {"statement", "whether", "which", "order"}
    for _, rule in RULES:
        tree = rule(dice)
        assert english.sentence(tree)
        assert german.sentence(tree)


def test_the_same_seed_gives_the_same_pairs_for_ever():
    text = "\n".join(f"{source}\t{target}" for source, target in pairs("train", 1000))
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "8826070ba3c99394"
    assert list(pairs("train", 10)) == list(pairs("train", 1000))[:10]
    assert list(pairs("train", 10)) != list(pairs("train", 10, seed=1))


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(DataError, match="did you mean 'test'"):
        pairs("tests", 1)
    with pytest.raises(DataError, match="count=-1"):
        pairs("train", -1)
    assert list(pairs("dev", 0)) == []
    assert {noun.english for noun in nouns("'living_room' sky")} == {"living room", "sun"}


def test_short_sentences_are_the_short_ones_among_all():
    short = list(pairs("train", 200, seed=3, max_words=6))
    every = list(pairs("train", 600, seed=3))
    assert short[:50] == [pair for pair in every if len(pair[0].split()) <= 6][:50]
    with pytest.raises(DataError, match="max_words=1 leaves no sentence"):
        pairs("train", 1, max_words=1)
