"""The hundred lines that people type first: their file, and the scores of translations."""

import pytest

from writehead.config import DecodeConfig
from writehead.engine import Engine
from writehead.errors import ConfigError, DataError
from writehead.training.first_lines import Line, evaluate_first_lines, read_first_lines


def test_every_reference_keeps_the_numbers_and_names():
    lines = read_first_lines()
    assert len(lines) == len({line.source for line in lines}) == 100
    for line in lines:
        assert all(part.strip() == part != "" for part in (line.source, *line.references))
        for reference in line.references:
            assert line.missing(reference) == [], line.source


def test_a_number_is_kept_only_as_a_whole():
    line = Line("3 of 12 in Rome", ["3 von 12 in Rom"], [["3"], ["12", "zwölf"], ["Rom", "Roma"]])
    assert line.missing("3 von zwölf in Rom") == []
    assert line.missing("13 von 120 in Paris") == ["3", "12", "Rom"]


def test_translations_are_scored(small_runs):
    engine = Engine.load(small_runs / "translation", "cpu")
    result = evaluate_first_lines(engine, ["greedy"])
    found, lines = result["first_lines"]["greedy"], read_first_lines()
    outputs = engine.translate([line.source for line in lines], DecodeConfig(beam=1, alpha=0.0))
    assert found["translations"] == [output.text for output in outputs]
    assert found["kept"] + len(found["missing"]) == found["to_keep"]
    assert 0.0 <= found["chrf"] <= 100.0
    with pytest.raises(ConfigError, match="unknown search"):
        evaluate_first_lines(engine, ["beam-5"])
    with pytest.raises(DataError, match="language models"):
        evaluate_first_lines(Engine.load(small_runs / "language", "cpu"))
