"""The built-in corpus against translations checked by hand and rules of both languages."""

import hashlib
import re
from collections import Counter

import pytest

from writehead.data.corpus import SPLITS, pairs
from writehead.data.corpus.lexicon import ADJECTIVES, NOUNS, VERBS
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


CHECKED_BY_HAND = """
She must not look for her son. | Sie darf ihren Sohn nicht suchen.
They must not give this man the cheese. | Sie dürfen diesem Mann den Käse nicht geben.
Paul has switched on the old computer. | Paul hat den alten Computer eingeschaltet.
I have got up. | Ich bin aufgestanden.
Her old daughter has not gone to Cologne. | Ihre alte Tochter ist nicht nach Köln gegangen.
Peter does not open a new suitcase. | Peter öffnet keinen neuen Koffer.
This boy has not eaten cheese. | Dieser Junge hat keinen Käse gegessen.
A woman is picking up our uncle. | Eine Frau holt gerade unseren Onkel ab.
The student wanted to look for the boy. | Der Student wollte den Jungen suchen.
On Tuesday, ten doctors will help my friendly aunt. | Am Dienstag werden zehn Ärzte meiner freundlichen Tante helfen.
Their clever uncle tries to switch on the lamps. | Ihr kluger Onkel versucht, die Lampen einzuschalten.
A girl tries to wait for him. | Ein Mädchen versucht, auf ihn zu warten.
Has your sick uncle arrived? | Ist Ihr kranker Onkel angekommen?
Would Peter not like to feed a bear? | Möchte Peter keinen Bären füttern?
What is the doctor buying? | Was kauft der Arzt gerade?
We pick up our son because it rains. | Wir holen unseren Sohn ab, weil es regnet.
He knows that Paul has driven to the new museum. | Er weiß, dass Paul ins neue Museum gefahren ist.
My big dog sleeps because it plays with this small rabbit. | Mein großer Hund schläft, weil er mit diesem kleinen Kaninchen spielt.
"""  # noqa: E501


def test_translations_are_those_checked_by_hand(corpus):
    known = dict(corpus["train"])
    for line in CHECKED_BY_HAND.strip().splitlines():
        source, target = line.split(" | ")
        assert known[source] == target
