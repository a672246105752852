"""The embedded corpus: its splits and seeds, and sentences translated by hand."""

import hashlib
from collections import defaultdict
from dataclasses import replace

import pytest

from writehead.data.grammar import SPLITS, english, german, pairs, split_of, tree
from writehead.data.grammar.joins import VERBS
from writehead.data.grammar.modifiers import ADJECTIVES
from writehead.data.grammar.nouns import NOUNS
from writehead.data.grammar.tree import Clause, Phrase, Sentence
from writehead.errors import DataError


@pytest.fixture(scope="module")
def corpus():
    return {split: list(pairs(split, 6000 if split == "train" else 600)) for split in SPLITS}


def test_splits_share_no_sentence_in_either_language(corpus):
    """Short sentences too: different English ones often have the same German translation."""
    owners = [defaultdict(set), defaultdict(set)]
    for split, drawn in corpus.items():
        assert {split_of(source) for source, _ in drawn} == {split}
        assert len({source for source, _ in drawn}) == len(drawn)
        for row in (*drawn, *pairs(split, 250, max_words=5)):
            for texts, text in zip(owners, row, strict=True):
                texts[text.lower()].add(split)
    assert all(len(splits) == 1 for texts in owners for splits in texts.values())
    assert len(owners[1]) < len(owners[0])


def test_pairs_depend_on_the_seed_alone_and_english_determines_german(corpus):
    train = corpus["train"]
    text = "\n".join(f"{source}\t{target}" for source, target in train[:1000])
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "8826070ba3c99394"
    assert list(pairs("train", 10)) == train[:10]
    short = [pair for pair in train if len(pair[0].split()) <= 6]
    assert list(pairs("train", 50, max_words=6)) == short[:50]
    known, again = dict(train), list(pairs("train", 2000, seed=1))
    assert sum(source in known for source, _ in again) < 0.15 * len(again)
    assert all(known.get(source, target) == target for source, target in again)


def test_impossible_requests_are_refused():
    for split, count, words in (("tests", 1, "'test'"), ("train", -1, "count=-1")):
        with pytest.raises(DataError, match=words):
            pairs(split, count)
    with pytest.raises(DataError, match="max_words=1"):
        pairs("train", 1, max_words=1)


def the(noun, word="", determiner="the", **rest):
    return Phrase(NOUNS[noun], determiner, adjectives=(ADJECTIVES[word],) if word else (), **rest)


GIVE = Clause(VERBS["give/geben"], the("teacher", "young"), time=("today", "heute"), front=True)
CALL = Clause(VERBS["call/anrufen"], the("woman"), accusative=the("doctor"))
DRINK = Clause(VERBS["drink/trinken"], Phrase(tree.I), accusative=Phrase(NOUNS["tea"]))
GET_UP = Clause(VERBS["get/aufstehen"], Phrase(tree.HE))


@pytest.mark.parametrize(
    ("sentence", "in_english", "in_german"),
    [
        (
            Sentence(replace(GIVE, dative=the("child"), accusative=the("apple", "red", "a"))),
            "Today the young teacher gives the child a red apple.",
            "Heute gibt der junge Lehrer dem Kind einen roten Apfel.",
        ),
        (
            Sentence(replace(CALL, modal=tree.MUST, negated=True)),
            "The woman must not call the doctor.",
            "Die Frau darf den Arzt nicht anrufen.",
        ),
        (
            Sentence(DRINK, conjunction=("because", "weil"), second=GET_UP, reversed=True),
            "Because he gets up, I drink tea.",
            "Weil er aufsteht, trinke ich Tee.",
        ),
    ],
)
def test_sentences_are_what_a_speaker_would_say(sentence, in_english, in_german):
    assert (english.sentence(sentence), german.sentence(sentence)) == (in_english, in_german)
