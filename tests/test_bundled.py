"""The bundled model: the commands that default to it, errors if it is missing, and its files."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from texts import sentences
from writehead.data.bpe import BPETokenizer
from writehead.engine import Engine
from writehead.errors import RunError
from writehead.interop.pretrained import RunFacts
from writehead.paper.presets import preset
from writehead.runs import read_config
from writehead.runs.bundled import BUNDLED, bundled_run
from writehead.runs.folder import read_quantization
from writehead.util.checksums import sha256

ROOT = Path(__file__).parents[1]
SHORT = ("--max-length=9", "--device=cpu")
FILES = ["checksums.sha256", "config.json", "model.safetensors", "tokenizer.model"]


def test_translate_uses_the_bundled_model_by_default(writehead, bundled):
    text = "\n".join(sentences(5)).encode()
    results = [writehead("translate", *run, *SHORT, stdin=text) for run in ((), (bundled,))]
    code, out, err = results[0]
    assert results[0] == results[1]
    assert (code, err, len(out.splitlines())) == (0, "", 5)
    assert len(set(out.splitlines())) > 1
    stdin = io.TextIOWrapper(io.BytesIO(b"the cat.\n"))
    stdin.isatty = lambda: True
    code, out, err = writehead("translate", *SHORT, stdin=stdin)
    assert (code, out.count("\n"), "bundled" in err) == (0, 1, True), (
        err
    )  # it is named at a terminal


def test_a_missing_bundled_model_is_an_error(refused, monkeypatch, tmp_path):
    monkeypatch.setattr("writehead.runs.bundled.BUNDLED", tmp_path / "none")
    command = ("translate", *SHORT, "--output", tmp_path / "out")
    assert str(tmp_path / "none") in refused(*command, stdin=b"the cat.")
    assert not (tmp_path / "out").exists()
    with pytest.raises(RunError, match="no bundled model at"):
        Engine.load()


def test_the_wheel_contains_the_model_and_its_card():
    paths = {one.distribution_path for one in WheelBuilder(str(ROOT)).recurse_included_files()}
    expected = {"MODEL_CARD.md", *(f"en-de/{name}" for name in FILES)}
    assert {f"writehead/bundled/{name}" for name in expected} <= paths


def test_the_bundled_model_is_small_quantized_multi_query_and_the_one_of_its_results():
    files = [path for path in BUNDLED.parent.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 16_000_000
    assert sorted(path.name for path in BUNDLED.iterdir()) == FILES
    for name in FILES[1:]:
        assert f"{sha256(BUNDLED / name)}  {name}\n" in (BUNDLED / FILES[0]).read_text()
    config = read_config(bundled_run())
    assert config == replace(preset("bundled/multi-query"), vocab_size=config.vocab_size)
    assert read_quantization(BUNDLED) is not None
    assert BPETokenizer.load(BUNDLED / "tokenizer.model").vocab_size <= config.vocab_size
    for name in ("quantized", "speed"):
        result = json.loads((ROOT / "results" / "bundled" / f"{name}.json").read_text())
        assert result["fingerprint"] == RunFacts.read(BUNDLED).fingerprint
