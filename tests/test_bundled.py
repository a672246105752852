"""The bundled model: the commands that default to it, errors if it is missing, and its files."""

import io
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from texts import sentences
from writehead.data.tokenizer import Tokenizer
from writehead.decoding import Engine
from writehead.errors import RunError
from writehead.model import read_config
from writehead.model.bundled import BUNDLED, bundled_run
from writehead.model.checksum import sha256
from writehead.model.runs import read_quantization, run_fingerprint
from writehead.paper.presets import preset

ROOT = Path(__file__).parents[1]
SHORT = ("--max-length=9", "--device=cpu")
FILES = ["checksums.sha256", "config.json", "model.safetensors", "tokenizer.model"]


@pytest.fixture
def typed(monkeypatch):
    """Gives a command its standard input."""

    def give(text: str) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))

    return give


def test_bench_translate_uses_the_bundled_model_by_default(writehead, tmp_path):
    text, path = tmp_path / "text", tmp_path / "result.json"
    text.write_text("Good morning!\n")
    options = ("--input", text, "--beam=1", "--device=cpu", "--repeats=1", "--no-peers")
    code, _, err = writehead("bench", "translate", *options, "--output", path)
    assert code == 0, err
    assert json.loads(path.read_text())["run"] == "writehead/bundled/en-de"


def test_translate_uses_the_bundled_model_by_default(writehead, bundled, typed):
    results = []
    for run in ((), (bundled,)):
        typed("\n".join(sentences(5)))
        results.append(writehead("translate", *run, *SHORT))
    code, out, err = results[0]
    assert results[0] == results[1]
    assert (code, err, len(out.splitlines())) == (0, "", 5)
    assert len(set(out.splitlines())) > 1


def test_a_missing_bundled_model_is_an_error(writehead, missing_bundled, typed, tmp_path):
    typed("the cat.")
    code, out, err = writehead("translate", *SHORT, "--output", tmp_path / "out")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert str(missing_bundled) in err
    assert not (tmp_path / "out").exists()
    with pytest.raises(RunError, match="no bundled model at"):
        Engine.load()


@pytest.mark.parametrize(
    ("run", "words"),
    [
        ("old news.en", "no run at 'old news.en'"),
        ("The cat sees\nthe dog.", r"no run at 'The cat sees\nthe dog.'"),
        ("x" * 3000, "x…"),
    ],
)
def test_text_instead_of_a_run_is_an_error(writehead, monkeypatch, tmp_path, run, words):
    monkeypatch.chdir(tmp_path)
    Path("old news.en").write_text("the cat.\n")
    code, out, err = writehead("translate", run, *SHORT)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err


@pytest.mark.parametrize("terminal", [True, False])
def test_the_model_is_named_only_at_a_terminal(writehead, bundled, typed, terminal):
    typed("the cat.\n")
    sys.stdin.isatty = lambda: terminal
    code, out, err = writehead("translate", *SHORT)
    assert (code, out.count("\n"), bool(err)) == (0, 1, terminal)


def test_the_wheel_contains_the_model_and_its_card(tmp_path):
    for name in ("pyproject.toml", ".gitignore", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, tmp_path / name)
    package = tmp_path / "src" / "writehead"
    (package / "bundled" / "en-de").mkdir(parents=True)
    shutil.copyfile(ROOT / "src" / "writehead" / "__init__.py", package / "__init__.py")
    for name in ("MODEL_CARD.md", *(f"en-de/{name}" for name in FILES)):
        (package / "bundled" / name).touch()
    paths = {one.distribution_path for one in WheelBuilder(str(tmp_path)).recurse_included_files()}
    expected = {"MODEL_CARD.md", *(f"en-de/{name}" for name in FILES)}
    assert {f"writehead/bundled/{name}" for name in expected} <= paths


def test_the_bundled_model_is_small_quantized_and_multi_query():
    files = [path for path in BUNDLED.parent.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 16_000_000
    assert sorted(path.name for path in BUNDLED.iterdir()) == FILES
    config = read_config(bundled_run())
    assert config == replace(preset("bundled/multi-query"), vocab_size=config.vocab_size)
    assert config.kind == "multi-query"
    assert read_quantization(BUNDLED) is not None
    assert Tokenizer.load(BUNDLED / "tokenizer.model").vocab_size <= config.vocab_size


def test_results_of_the_bundled_model_match_its_weights():
    folder = ROOT / "results" / "bundled"
    scored, timed = (
        json.loads((folder / f"{name}.json").read_text()) for name in ("quantized", "speed")
    )
    assert scored["fingerprint"] == timed["fingerprint"] == run_fingerprint(BUNDLED)
    for name in FILES[1:]:
        assert f"{sha256(BUNDLED / name)}  {name}\n" in (BUNDLED / FILES[0]).read_text()
    assert scored["model"] == read_config(BUNDLED).to_json()
