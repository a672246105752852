"""The report on the bundled model: its own result files, with figures the tests choose."""

import contextlib
import functools
import json
import re
import shutil
from pathlib import Path

import pytest

from texts import save_small_runs, sentences
from writehead.errors import RunError
from writehead.model.runs import run_fingerprint
from writehead.paper.bundled import read_bundled
from writehead.paper.report import BEGIN, END, FIGURES

ROOT = Path(__file__).parents[2]
CARD = Path("src") / "writehead" / "bundled" / "MODEL_CARD.md"
EXPECTED = [
    ["as trained", "80,000,000", "2.100", "20.00 / 21.00", "19.50 / 20.25", "–"],
    ["8 bits", "16,000,000", "2.123", "19.90 / 21.25", "19.50 / 20.25", "43.2 / 9.88"],
    ["change", "−80%", "+0.023", "−0.10 / +0.25", "+0.00 / +0.00", "–"],
]


def change(path, **changes):
    """Sets values in a JSON file, by names such as bleu__greedy__intl; ... removes one."""
    found = json.loads(path.read_text())
    for names, value in changes.items():
        *inside, last = names.replace("beam4", "beam-4").split("__")
        place = functools.reduce(dict.__getitem__, inside, found)
        if value is ...:
            del place[last]
        else:
            place[last] = value
    path.write_text(json.dumps(found))


@pytest.fixture
def project(tmp_path):
    """A project of README, model card and results with known figures."""
    bundled = shutil.copytree(ROOT / "results" / "bundled", tmp_path / "results" / "bundled")
    scores = {"bleu__greedy__13a": 19.5, "bleu__beam4__13a": 20.25}
    for name, size, loss, greedy, beam in (
        ("float32", 80_000_000, 2.1, 20.0, 21.0),
        ("quantized", 16_000_000, 2.123, 19.9, 21.25),
    ):
        scores |= {"bleu__greedy__intl": greedy, "bleu__beam4__intl": beam}
        change(bundled / f"{name}.json", bytes=size, ln_ppl=loss, **scores)
    change(bundled / "quantized.json", quantization={"bits": 8, "group": None})
    for search, speed in (("greedy", 43.21), ("beam4", 9.876)):
        place = f"engines__ours__searches__{search}__sentences_per_second"
        change(bundled / "speed.json", **{place: speed})
    (tmp_path / CARD).parent.mkdir(parents=True)
    (tmp_path / CARD).write_text(f"# Card\n{FIGURES[0]}\nold\n{FIGURES[1]}\nlimits\n")
    (tmp_path / "README.md").write_text(f"# Ours\n{BEGIN}\nold\n{END}\n")
    return tmp_path


@pytest.fixture
def report(writehead, project):
    places = (f"--results={project / 'results'}", f"--readme={project / 'README.md'}")
    return lambda *options: writehead("report", *places, f"--output={project / 'out'}", *options)


def cells(text):
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line] for line in lines]


def test_readme_and_card_have_the_figures_and_are_checked(report, project):
    ours = (ROOT / CARD).read_text(encoding="utf-8")
    assert [ours.count(mark) for mark in FIGURES] == [1, 1]
    assert all(words in ours for words in ("CC-BY 2.0 FR", "European Parliament", "## Its limits"))
    assert report()[0] == 0
    card = project / CARD
    readme = (project / "README.md").read_text()
    for text in (readme, card.read_text()):
        assert cells(text)[-3:] == EXPECTED
        assert "newstest2014.en, 3,003 sentences" in text
        assert re.search(r"train\.steps=\d+", text)
    assert card.read_text().startswith(f"# Card\n{FIGURES[0]}\n|")
    assert card.read_text().endswith(f"{FIGURES[1]}\nlimits\n")
    assert re.search(r"Not run: Table 1.*Table 2.*Table 3", readme)
    assert report("--check") == (0, "", "")
    stale = card.read_text().replace("19.90", "29.90")
    card.write_text(stale)
    code, out, err = report("--check")
    assert (code, out, str(card) in err, card.read_text()) == (1, "", True, stale)
    assert report()[0] == report("--check")[0] == 0

    other = project / "other.md"
    for text, expected in ((stale, 0), ("no marks\n", 2)):
        other.write_text(text)
        code, _, err = report(f"--card={other}")
        assert (code, FIGURES[0] in err) == (expected, expected == 2)
    (project / "results" / "bundled" / "speed.json").unlink()
    assert report()[0] == 0
    for path in (project / "README.md", card):
        assert re.search(r"Not run: .*bundled/speed.json", path.read_text())


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("train", "[]", "train.json is damaged"),
        ("quantized", {"bleu__beam4": ...}, "lacks bleu"),
        ("float32", {"quantization": {"bits": 8}}, "float32.json is of a quantized run"),
        ("float32", {"on": "other/olds.en"}, "differ in their text"),
        ("speed", {"fingerprint": "0"}, "different weights"),
        ("train", {"model__f": 99}, "another model"),
        ("float32", {"ln_ppl": "x"}, "ln_ppl"),
        ("float32", {"on": "elsewhere/newstest2014.en"}, None),
    ],
)
def test_files_that_do_not_fit_together_are_refused(project, name, changes, words):
    path = project / "results" / "bundled" / f"{name}.json"
    if isinstance(changes, str):
        path.write_text(changes)
    else:
        change(path, **changes)
    with pytest.raises(RunError, match=words) if words else contextlib.nullcontext():
        read_bundled(project / "results")


def test_evaluate_and_bench_say_which_weights_their_figures_are_of(writehead, tmp_path):
    text, path = tmp_path / "news.en", tmp_path / "result.json"
    text.write_text("\n".join(sentences(2)) + "\n")
    for run in save_small_runs(tmp_path):
        files = [file for file in run.iterdir() if file.suffix != ".sha256"]
        for command in (
            ("evaluate", run, "--source", text, "--reference", text),
            ("bench", "translate", run, "--input", text, "--repeats=1"),
        ):
            assert writehead(*command, "--device=cpu", "--output", path, "--force")[0] == 0
            found = json.loads(path.read_text())
            assert found["fingerprint"] == run_fingerprint(run)
            assert found["bytes"] == sum(file.stat().st_size for file in files)
            assert (found["quantization"] is None) == (run.name == "plain")
