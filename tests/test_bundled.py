"""The bundled model: who uses it by default, errors if it is missing, and its files."""

import io
import json
import re
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
LINES = sentences(5)
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
    said = []
    for run in ((), (bundled,)):
        typed("\n".join(LINES))
        said.append(writehead("translate", *run, *SHORT))
    code, out, err = said[0]
    assert said[0] == said[1]
    assert (code, err, len(out.splitlines())) == (0, "", len(LINES))
    assert len(set(out.splitlines())) > 1


def test_a_missing_bundled_model_is_an_error(writehead, empty_box, typed, tmp_path):
    typed("the cat.")
    code, out, err = writehead("translate", *SHORT, "--output", tmp_path / "out")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert str(empty_box) in err
    assert not (tmp_path / "out").exists()
    with pytest.raises(RunError, match="no bundled model at"):
        Engine.load()


@pytest.mark.parametrize(
    ("run", "words"),
    [
        ("old news.en", "no run at 'old news.en'"),
        ("The cat sees\nthe dog.", r"no run at 'The cat sees\nthe dog.'"),
        ("x" * 3000, "x…"),
        ("", "there is no run at ''"),
    ],
)
def test_text_instead_of_a_run_is_an_error_that_explains_where_text_goes(
    writehead, monkeypatch, tmp_path, run, words
):
    monkeypatch.chdir(tmp_path)
    Path("old news.en").write_text("the cat.\n")
    code, out, err = writehead("translate", run, *SHORT)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err


@pytest.mark.parametrize("terminal", [True, False])
def test_the_model_is_named_at_a_terminal_only(writehead, bundled, typed, terminal):
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
    packed = {one.distribution_path for one in WheelBuilder(str(tmp_path)).recurse_included_files()}
    assert {f"writehead/bundled/en-de/{name}" for name in FILES} <= packed
    assert "writehead/bundled/MODEL_CARD.md" in packed


def test_the_bundled_model_is_small_quantized_and_multi_query():
    size = sum(path.stat().st_size for path in BUNDLED.parent.rglob("*") if path.is_file())
    assert size <= 16_000_000
    names = sorted(path.name for path in BUNDLED.iterdir())
    assert names == FILES
    config = read_config(bundled_run())
    assert config == replace(preset("bundled/multi-query"), vocab_size=config.vocab_size)
    assert config.kind == "multi-query"
    assert read_quantization(BUNDLED) is not None
    assert Tokenizer.load(BUNDLED / "tokenizer.model").vocab_size <= config.vocab_size


def test_the_bundled_model_translates_the_sentence_of_the_readme(writehead, typed):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    [sentence] = re.findall(r'^\$ echo "([^"]+)" \| writehead translate$', readme, re.MULTILINE)
    typed(sentence)
    code, out, _ = writehead("translate", "--device=cpu")
    assert (code, out.count("\n")) == (0, 1)
    assert "Ausschuss" in out or "Bericht" in out


def test_results_of_the_bundled_model_are_those_of_its_weights():
    folder = ROOT / "results" / "bundled"
    scored, timed = (
        json.loads((folder / f"{name}.json").read_text()) for name in ("quantized", "speed")
    )
    assert scored["fingerprint"] == timed["fingerprint"] == run_fingerprint(BUNDLED)
    for name in FILES[1:]:
        assert f"{sha256(BUNDLED / name)}  {name}\n" in (BUNDLED / FILES[0]).read_text()
    assert scored["model"] == read_config(BUNDLED).to_json()
