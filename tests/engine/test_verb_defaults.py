"""Defaults: the beam of each search, the limits of a line, and the dtype."""

import logging
import unicodedata
from itertools import chain, count

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from search_toys import random_toy
from texts import sentences, tokenizer
from writehead.config import DecodeConfig
from writehead.data.tokenizer import normalise
from writehead.engine import beam_search, greedy
from writehead.engine.batching import split_line
from writehead.errors import ConfigError
from writehead.util import devices

LINES = sentences(8)


@pytest.mark.parametrize(
    ("given", "beam"), [({}, 4), ({"max_length": 20}, 4), ({"temperature": 0.8, "seed": 2}, 1)]
)
def test_translate_uses_beam_search_unless_sampling(translator, given, beam):
    got = list(translator.translate(LINES, DecodeConfig(**given)))
    assert got == list(translator.translate(LINES, DecodeConfig(**given, beam=beam)))
    assert got != list(translator.translate(LINES, DecodeConfig(beam=1)))
    with pytest.raises(ConfigError, match=r"n_best=5 .* beam=4"):
        translator.translate(LINES, DecodeConfig(n_best=5, max_length=9))


def test_generate_stream_and_the_searches_are_greedy_by_default(writer):
    options, narrow = DecodeConfig(max_length=9), DecodeConfig(max_length=9, beam=1)
    assert list(writer.generate(LINES, options)) == list(writer.generate(LINES, narrow))
    [text] = writer.generate(LINES[:1], narrow)
    assert "".join(writer.stream(LINES[0], options)) == text.text
    toy = random_toy(6, seed=1)
    expected = greedy(toy.step, toy.start(1), narrow, eos=0)
    assert beam_search(toy.step, toy.start(1), options, eos=0) == [expected]


@pytest.mark.parametrize(
    ("flags", "warns"),
    [("flags\t: fpu avx2 avx512f\n", True), ("Features\t: fp asimd bf16\n", False), (None, False)],
)
def test_emulated_bfloat16_warns_once(monkeypatch, tmp_path, caplog, flags, warns):
    if flags is not None:
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{flags}")
    monkeypatch.setattr(devices, "CPU_INFO", tmp_path / "cpuinfo")
    devices.warn_if_emulated.cache_clear()
    cpu = torch.device("cpu")
    with caplog.at_level(logging.WARNING):
        for name in ("bfloat16", torch.bfloat16, "float32", None):
            devices.find_dtype(name, cpu)
        devices.find_dtype("bfloat16", torch.device("cuda"))
    devices.warn_if_emulated.cache_clear()
    assert ["bfloat16" in message for message in caplog.messages] == [True] * warns


MARKS = [chr(code) for code in range(0x110000) if unicodedata.combining(chr(code))]


@given(st.lists(st.sampled_from([*MARKS[::7], "\u0344", "e", "ä", "\u09c7", "\u09be", " "])))
def test_runs_of_combining_marks_are_bounded_and_others_untouched(characters):
    text = normalise("".join(character * 9 for character in characters))
    assert normalise(text) == text
    marks = 0
    for character in text:
        marks = marks + 1 if unicodedata.combining(character) else 0
        assert marks <= 30
    short = "e" + "".join(characters[:20])
    assert normalise(short) == " ".join(unicodedata.normalize("NFC", short).split())


@pytest.mark.parametrize(
    "line",
    ["e" + "".join(MARKS) * 400, "x" * 400_000, "a.b," * 100_000, "a. " * 100_000],
    ids=count(),
)
def test_an_extreme_line_is_shortened(line):
    pieces, shortened = split_line(line, tokenizer().encode, 255)
    assert shortened
    assert 1 <= max(map(len, pieces)) <= 255
    assert sum(len(piece) + 50 for piece in pieces) <= 32_768


def test_only_extreme_lines_are_shortened_with_a_warning(translator, caplog):
    long = " ".join(sentences(400))
    pieces, shortened = split_line(long, tokenizer().encode, 255)
    assert not shortened
    assert tokenizer().decode(chain.from_iterable(pieces)) == long
    options = DecodeConfig(beam=1, max_length=2)
    word, text, _ = translator.translate(["x" * 2000, "the cat.", long], options)
    assert word.pieces < 1100 / 23 * 2
    assert text.pieces == 1
    named = [message.split(" is ")[0] for message in caplog.messages if "is cut to" in message]
    assert named == ["line 1"]
