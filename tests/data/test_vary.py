"""Variations of training pairs: what may change, in how many pairs, and that it is reproducible."""

import re
from collections import Counter
from dataclasses import replace

import pytest

from corpora import files, pair_inputs, sentences
from writehead.config import PrepareConfig
from writehead.data.prepare import prepare
from writehead.data.vary import MAX_CAPITALS, Variation
from writehead.errors import ConfigError

CONFIG = PrepareConfig(task="translation", vocab_size=400, dev=0)
PAIRS = [(line, f"Ü {line}") for line in sentences(2000, seed=3, longest=14)]


def variation(**shares):
    return Variation(PrepareConfig(task="translation", **shares))


def forms(pair):
    """All forms that a pair may have after its case is varied."""
    (a, b), upper = pair, lambda text: text[:1].upper() + text[1:]
    return {
        pair,
        (upper(a), upper(b)),
        *([] if a[1:2].isupper() else [(a[:1].lower() + a[1:], b)]),
        (a.lower(), b),
        *([(a.upper(), b.upper())] if len(a) <= MAX_CAPITALS else []),
    }


def test_case_changes_at_the_start_or_everywhere_and_lower_case_keeps_the_translation():
    vary, seen = variation(vary_case=1), Counter[str]()
    for pair in [*PAIRS, *((a.lower(), b.lower()) for a, b in PAIRS), *[("IP address", "IP")] * 9]:
        varied = vary(pair) or pair
        assert varied in forms(pair)
        seen["capitals"] += varied[0].isupper()
        seen["lower"] += varied[0].islower() and not pair[0].islower()
        seen["start"] += varied[0][0].isupper() > pair[0][0].isupper()
    assert min(seen.values()) > 100, seen


@pytest.mark.parametrize("text", ["See http://a.B/c", "Hi @You", "Run ${File}", "#Tag", "", " "])
def test_the_case_of_addresses_and_placeholders_stays(text):
    vary = variation(vary_case=1)
    assert [vary((text, text)) for _ in range(20)] == [None] * 20


def test_a_number_or_name_of_both_sides_is_replaced_on_both():
    vary = variation(vary_copies=1)
    for pair, old in (
        (("Room 2417 is free.", "Zimmer 2417 ist frei."), "2417"),
        (("I saw Tom.", "Ich habe Tom gesehen."), "Tom"),
    ):
        found = set()
        for _ in range(200):
            if varied := vary(pair):
                patterns = [re.escape(text).replace(old, "(.+)") for text in pair]
                words = [re.fullmatch(*one)[1] for one in zip(patterns, varied, strict=True)]
                assert words[0] == words[1]
                assert len(words[0]) == 4 or not old.isdecimal()
                found.add(words[0])
        assert len(found) > 100
        assert old.isdecimal() == all(word.isdecimal() for word in found)


def test_other_pairs_get_the_same_word_at_the_same_end():
    vary, added = variation(vary_copies=1), Counter()
    pair = ("the ice melts in March", "das Eis schmilzt im März")
    for _ in range(3000):
        a, b = vary(pair)
        if a == b:
            word = a
        else:
            word = a.removeprefix(pair[0]).removesuffix(pair[0]).strip()
            assert (a, b) in {(f"{x} {word}", f"{y} {word}") for x, y in [pair]} | {
                (f"{word} {x}", f"{word} {y}") for x, y in [pair]
            }
        assert word
        assert " " not in word
        added["e-mail"] += "@" in word
        added["URL"] += word.startswith(("http", "www."))
        added["name"] += word.isalpha()
        added["code"] += bool(re.fullmatch(r"[A-Z]{2,3}-?\d{3}", word))
        added["number"] += bool(re.fullmatch(r"\d+([.-]\d+)+", word))
        added["emoji"] += ord(word[0]) > 0x2600
    assert min(added[kind] for kind in ("e-mail", "URL", "name", "code", "number", "emoji")) > 50, (
        added
    )


def test_the_shares_of_changed_pairs_are_those_asked_for(tmp_path):
    inputs, expected = pair_inputs(tmp_path, PAIRS), Counter(PAIRS)
    for name, shares in (("a", {"vary_case": 0.25}), ("b", {"vary_copies": 0.25})):
        config = PrepareConfig(task="translation", vocab_size=400, dev=40, **shares)
        dataset = prepare(tmp_path / name, inputs, config, threads=1)
        rows = {
            split: [
                tuple(dataset.tokenizer.decode(side[i]) for side in sides.values())
                for i in range(len(dataset.split(split)))
            ]
            for split in ("train", "dev")
            for sides in [dataset.split(split).sides]
        }
        assert (len(rows["train"]), len(rows["dev"])) == (1960, 40)
        assert not Counter(rows["dev"]) - expected  # only training pairs change
        changed = (Counter(rows["train"]) - expected).total() / 1960
        assert abs(changed - 0.25) < 0.05  # five standard deviations


def test_a_pair_that_a_change_makes_too_long_stays_as_it_is(tmp_path):
    inputs = pair_inputs(tmp_path, PAIRS)
    config = PrepareConfig(task="translation", vocab_size=400, dev=0, max_tokens=24, max_ratio=9)
    plain = prepare(tmp_path / "plain", inputs, config, threads=1)
    changed = replace(config, vary_copies=1.0)
    varied = prepare(tmp_path / "varied", inputs, changed, threads=1).split("train")
    assert len(varied) == len(plain.split("train")) < len(PAIRS)
    assert max(len(side[i]) for side in varied.sides.values() for i in range(len(varied))) <= 24


def test_a_pair_is_changed_in_one_way_only():
    vary = variation(vary_case=0.5, vary_copies=0.5)
    pair = ("the ice melts in March", "das Eis schmilzt im März")
    for _ in range(500):
        if varied := vary(pair):
            assert varied in forms(pair) or varied[0] == varied[1] or pair[0] in varied[0]


def test_the_same_config_makes_the_same_bytes_with_any_number_of_threads(tmp_path):
    inputs = pair_inputs(tmp_path, PAIRS)
    config = PrepareConfig(task="translation", vocab_size=400, vary_case=0.5, vary_copies=0.5)
    one, two = (prepare(tmp_path / str(n), inputs, config, threads=n).directory for n in (1, 2))
    assert files(one) == files(two)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"vary_case": 0.6, "vary_copies": 0.6}, "at most 1"),
        ({"vary_copies": -0.1}, "at least 0"),
        ({"task": "language", "vary_case": 0.1}, "for translation"),
    ],
)
def test_impossible_shares_are_refused(fields, words):
    with pytest.raises(ConfigError, match=words):
        PrepareConfig(**{"task": "translation", **fields})


def test_datasets_without_variation_describe_their_config_as_before():
    assert not {"vary_case", "vary_copies"} & CONFIG.to_json().keys()
    varied = PrepareConfig(task="translation", vary_case=0.1)
    assert PrepareConfig.from_json(varied.to_json()) == varied
