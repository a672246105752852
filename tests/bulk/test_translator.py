"""BatchTranslator: adds columns to batches, also after pickling."""

import pickle

import numpy as np
import pytest

from texts import sentences
from writehead import BatchTranslator, DecodeConfig, Engine
from writehead.data.lines import plain_line
from writehead.errors import ConfigError, DataError, RunError

LINES = sentences(6)
PLACE = {"device": "cpu", "dtype": "float64"}
OPTIONS = DecodeConfig(beam=2, max_length=9)


@pytest.fixture(scope="module")
def run(small_runs):
    return str(small_runs / "translation")


@pytest.fixture(scope="module")
def outputs(run):
    """The hypotheses of LINES, without control characters."""
    found = Engine.load(run, **PLACE).translate(LINES, OPTIONS)
    best = [output.hypotheses[0] for output in found]
    return [one._replace(text=plain_line(one.text)) for one in best]


@pytest.mark.parametrize("make", [list, np.array, lambda texts: np.array(texts, dtype=object)])
def test_a_column_of_translations_is_added(run, outputs, make):
    translate = BatchTranslator(run, OPTIONS, **PLACE)
    batch = {"text": make(LINES), "id": [*range(6)]}
    for copy in (translate, pickle.loads(pickle.dumps(translate))):
        found = copy(batch)
        assert list(found) == ["text", "id", "translation"]
        assert found["text"] is batch["text"]
        assert type(found["translation"]) is type(batch["text"])
        assert list(found["translation"]) == [one.text for one in outputs]
    assert list(batch) == ["text", "id"]


def test_scores_and_texts_of_several_lines(run, outputs):
    translate = BatchTranslator(run, OPTIONS, column="en", output_column="de", scores=True, **PLACE)
    texts = ["\n".join(LINES[:2]), None, "", LINES[2]]
    found = translate({"en": texts})
    assert found["de"] == [f"{outputs[0].text}\n{outputs[1].text}", None, "", outputs[2].text]
    mean = (outputs[0].score + outputs[1].score) / 2
    assert found["de_score"] == pytest.approx([mean, None, 0.0, outputs[2].score], abs=1e-6)
    array = translate({"en": np.array(texts, dtype=object)})["de_score"]
    assert array.dtype == float
    assert np.isnan(array).tolist() == [False, True, False, False]


def test_an_empty_batch_gains_columns_too(run):
    found = BatchTranslator(run, OPTIONS, **PLACE)({"text": np.array([], dtype=object)})
    assert found["translation"].shape == (0,)


def test_bad_arguments_and_batches_are_errors(run, small_runs):
    for arguments, error, words in (
        ({"run": "nowhere"}, RunError, "nowhere"),
        ({"run": run, "options": {"beam": 4}}, ConfigError, "must be a DecodeConfig"),
        ({"run": run, "target_lang": "de"}, ConfigError, "no such codes"),
        ({"run": str(small_runs / "language")}, ConfigError, "cannot translate"),
    ):
        with pytest.raises(error, match=words):
            BatchTranslator(**arguments)
    translate = BatchTranslator(run, OPTIONS, **PLACE)
    for batch, words in (
        (LINES, "must be a dict with the column 'text', not list"),
        ({"texts": LINES}, "must be a dict with the column 'text', not"),
        ({"text": LINES, "translation": []}, "already has the column 'translation'"),
        ({"text": "two words"}, "must be a list of texts, not one text"),
        ({"text": ["a", 5]}, "text 2 of a batch must be a str, not int"),
        ({"text": ["a", float("nan")]}, "text 2 of a batch must be a str, not float"),
        ({"text": ["\ud800"]}, "is not UTF-8"),
    ):
        with pytest.raises(DataError, match=words):
            translate(batch)
