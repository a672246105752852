"""The built-in corpus against sentences written by hand and against rules of both languages."""

import hashlib
import re
from collections import Counter
from dataclasses import replace

import pytest

from writehead.data.corpus import SPLITS, english, german, pairs, syntax
from writehead.data.corpus.lexicon import ADJECTIVES, NOUNS, VERBS
from writehead.data.corpus.syntax import Clause, NounPhrase
from writehead.errors import DataError


@pytest.fixture(scope="module")
def corpus():
    return {split: list(pairs(split, 6000 if split == "train" else 600)) for split in SPLITS}


def test_splits_are_disjoint_in_both_languages(corpus):
    split = {}
    for name, rows in corpus.items():
        for row in (*rows, *pairs(name, 300, seed=1, max_words=4)):
            for text in row:
                assert split.setdefault(text.lower(), name) == name, text
        for side in (0, 1):
            assert len({row[side].lower() for row in rows}) == len(rows)


def test_pairs_depend_on_the_arguments_alone_and_english_determines_german(corpus):
    train = corpus["train"]
    text = "\n".join(f"{source}\t{target}" for source, target in train[:1000])
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "102e3eab54b57586"
    assert list(pairs("train", 10)) == train[:10]
    short = [pair for pair in train if len(pair[0].split()) <= 6]
    assert list(pairs("train", 50, max_words=6)) == short[:50]
    known, others = dict(train), list(pairs("train", 3000, seed=1))
    assert sum(source in known for source, _ in others) < 0.2 * len(others)
    assert all(known.get(source, target) == target for source, target in others)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("tests", 1), "'test'"),
        (("train", -1), "count"),
        (("train", 1, 0, 1), "max_words"),
        (("test", 5000, 0, 2), "ask for fewer"),
    ],
)
def test_impossible_arguments_are_refused(monkeypatch, arguments, words):
    monkeypatch.setattr("writehead.data.corpus.MAX_CONSECUTIVE_MISSES", 1000)
    with pytest.raises(DataError, match=words):
        list(pairs(*arguments))


def test_every_word_is_used_and_every_sentence_is_well_formed(corpus):
    words = [Counter(), Counter()]
    for row in corpus["train"]:
        for side, text in enumerate(row):
            assert re.fullmatch(r"[A-ZÄÖÜ][^.?]*[.?]", text), text
            assert not re.search(r"  | [,.?]|,,|,[.?]|[^\w ,.?'-]|_|\d", text), text
            words[side].update(re.findall(r"[\w-]+", text.lower()))
        assert not re.search(r"\ban [^aeiou]|\ba [aeiou]", row[0]), row
        assert not re.search(r"\b(?:in dem|in das|zu dem|zu der|an dem|von dem)\b", row[1]), row
    assert set(ADJECTIVES) | {noun.english.lower() for noun in NOUNS.values()} <= set(words[0])
    assert {noun.german[0].lower() for noun in NOUNS.values()} <= set(words[1])
    for verb in (verb.english for verb in VERBS):
        assert {verb.base, verb.third, verb.past, verb.ing, "is"} & set(words[0]), verb


# the ending of an adjective by gender and determiner; E stands for ein, kein, mein, …
NOUNS_BY_GENDER = {
    "m": "Hund|Brief|Mantel|Apfel",
    "f": "Frau|Katze|Tasche|Tür",
    "n": "Pferd|Haus|Schloss",
}
ENDINGS = {
    "m": "der:e den:en dem:en dieser:e diesen:en diesem:en E:er Een:en Eem:en",
    "f": "die:e der:en diese:e dieser:en Ee:e Eer:en",
    "n": "das:e dem:en dieses:e diesem:en E:es Eem:en",
}


@pytest.mark.parametrize("gender", ENDINGS)
def test_german_determiners_and_adjectives_agree(corpus, gender):
    determiner = r"(die|de[rnm]|das|dies\w+|(?:[km]?ein|ihr|unser)(?:e[rnm]?)?)"
    stems, nouns = "|".join(word.stem for word in ADJECTIVES.values()), NOUNS_BY_GENDER[gender]
    phrase = re.compile(rf"\b{determiner} (?:{stems})(e[rnms]?) (?:{nouns})\b")
    seen = set()
    for _, target in corpus["train"]:
        for word, ending in phrase.findall(target[0].lower() + target[1:]):
            word = re.sub("^(?:[km]?ein|ihr|unser)", "E", word)
            assert f"{word}:{ending}" in ENDINGS[gender].split(), target
            seen.add(word)
    assert len(seen) > 3


def verb(infinitive):
    return next(v for v in VERBS if v.german.prefix + v.german.infinitive == infinitive)


def the(noun, adjective="", determiner="the", **options):
    return NounPhrase(NOUNS[noun], determiner, adjective=ADJECTIVES.get(adjective), **options)


HE, SOON = NounPhrase(syntax.HE), ("soon", "bald")
CALL = Clause(verb("anrufen"), the("woman"), accusative=the("neighbour", "sick"))
SWITCH = Clause(verb("einschalten"), NounPhrase(syntax.WE), accusative=NounPhrase(syntax.IT["f"]))
DRINK = Clause(verb("trinken"), HE, accusative=the("tea", "cold", ""))
WAIT = Clause(verb("warten"), the("child", plural=True), prepositional=the("bus", "", "a"))
GO = Clause(verb("gehen"), the("student", "", "this"), "perfect", place=("home", "nach Hause"))
READ = Clause(verb("lesen"), HE, accusative=the("book", "old", "my", plural=True))


@pytest.mark.parametrize(
    ("clause", "in_english", "in_german"),
    [
        (replace(CALL, negated=True, modal=syntax.MUST_NOT),
         "the woman must not call the sick neighbour",
         "die Frau darf den kranken Nachbarn nicht anrufen"),
        (replace(SWITCH, tense="perfect"), "we have switched it on", "wir haben sie eingeschaltet"),
        (replace(DRINK, negated=True), "he does not drink cold tea", "er trinkt keinen kalten Tee"),
        (replace(DRINK, tense="progressive", place=("here", "hier")),
         "he is drinking cold tea here", "er trinkt gerade hier kalten Tee"),
        (replace(WAIT, modal=syntax.WANT, tense="past", time=SOON),
         "the children wanted to wait for a bus soon",
         "die Kinder wollten bald auf einen Bus warten"),
        (replace(GO, negated=True), "this student has not gone home",
         "dieser Student ist nicht nach Hause gegangen"),
        (replace(READ, tense="future"), "he will read my old books",
         "er wird meine alten Bücher lesen"),
        (Clause(verb("versuchen"), HE, "past", infinitive=replace(SWITCH, subject=HE)),
         "he tried to switch it on", "er versuchte, sie einzuschalten"),
    ],
)  # fmt: skip
def test_main_clauses(clause, in_english, in_german):
    assert english.clause(clause) == in_english
    assert german.clause(clause, "second") == in_german


def test_questions_and_subordinate_clauses():
    question = replace(CALL, tense="perfect")
    assert english.clause(question, inverted=True) == "has the woman called the sick neighbour"
    assert german.clause(question, "first") == "hat die Frau den kranken Nachbarn angerufen"
    assert german.clause(question, "last", lead="weil").endswith("Nachbarn angerufen hat")
    what = replace(READ, accusative=None)
    assert english.clause(what, lead="what", inverted=True) == "what does he read"
    assert german.clause(what, "first", lead="was") == "was liest er"
    assert german.clause(SWITCH, "last", lead="dass") == "dass wir sie einschalten"
