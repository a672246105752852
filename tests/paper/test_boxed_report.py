"""The report on the model in the box: files of small models whose figures tests set."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from texts import save_small_runs, sentences
from writehead.cli import app
from writehead.config import TrainConfig
from writehead.model import read_config
from writehead.model.runs import run_bytes, run_fingerprint
from writehead.paper.report import BEGIN, END, FIGURES

ROOT = Path(__file__).parents[2]
CARD = Path("src") / "writehead" / "boxed" / "MODEL_CARD.md"
TITLE = "## The model in the box\n"
SIGNATURE = "nrefs:1|case:mixed|eff:no|tok:intl|smooth:exp|version:"


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The four files as the commands write them, of a small model before and after quantizing."""
    folder = tmp_path_factory.mktemp("measured")
    plain, quantized = save_small_runs(folder)
    (folder / "news.en").write_text("\n".join(sentences(4)) + "\n")
    text, boxed = folder / "news.en", folder / "results" / "boxed"
    scoring = ("--source", text, "--reference", text, "--device=cpu")
    timing = ("--input", text, "--device=cpu")
    for command in (
        ("evaluate", plain, *scoring, "--output", boxed / "float32.json"),
        ("evaluate", quantized, *scoring, "--output", boxed / "quantized.json"),
        ("bench", "translate", quantized, *timing, "--output", boxed / "speed.json"),
    ):
        done = CliRunner().invoke(app, list(map(str, command)))
        assert done.exit_code == 0, done.output
    train = replace(TrainConfig(), steps=3000, warmup=300, seed=5, log_every=7)
    facts = {"format": 1, "model": read_config(plain).to_json(), "train": train.to_json()}
    (boxed / "train.json").write_text(json.dumps(facts))
    return folder


def change(path, **changes):
    """Sets values in a file of JSON, by names such as bleu__greedy__intl."""
    found = json.loads(path.read_text())
    for names, value in changes.items():
        *inside, last = names.replace("beam4", "beam-4").split("__")
        place = found
        for name in inside:
            place = place[name]
        place[last] = value
    path.write_text(json.dumps(found))


@pytest.fixture
def project(measured, tmp_path):
    """A project of README and card, with results whose figures are known."""
    boxed = tmp_path / "results" / "boxed"
    shutil.copytree(measured / "results" / "boxed", boxed)
    scores = {"bleu__greedy__13a": 19.5, "bleu__beam4__13a": 20.25}
    change(
        boxed / "float32.json",
        **{"bytes": 80_000_000, "ln_ppl": 2.1, **scores},
        **{"bleu__greedy__intl": 20.0, "bleu__beam4__intl": 21.0},
    )
    change(
        boxed / "quantized.json",
        **{"bytes": 16_000_000, "ln_ppl": 2.123, "parameters": 20_123_456, **scores},
        hardware__device="a scorer",
        **{"bleu__greedy__intl": 19.9, "bleu__beam4__intl": 21.25},
    )
    ours = "engines__ours"
    change(
        boxed / "speed.json",
        **{f"{ours}__searches__greedy__sentences_per_second": 43.21},
        **{f"{ours}__searches__beam4__sentences_per_second": 9.876, f"{ours}__load_s": 0.456},
        environment__hardware={"device": "a chip", "cores": 4, "threads": 3},
    )
    card = tmp_path / CARD
    card.parent.mkdir(parents=True)
    card.write_text(f"# Card\n\n{FIGURES[0]}\nold\n{FIGURES[1]}\nlimits\n", encoding="utf-8")
    (tmp_path / "README.md").write_text(f"# Ours\n{BEGIN}\nold\n{END}\n", encoding="utf-8")
    return tmp_path


@pytest.fixture
def report(writehead, project):
    """Runs the report in the project."""

    def run(*options):
        places = (f"--results={project / 'results'}", f"--readme={project / 'README.md'}")
        return writehead("report", *places, f"--output={project / 'out'}", *options)

    return run


def cells(text):
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]


EXPECTED = [
    ["as trained", "80,000,000", "2.100", "20.00 / 21.00", "19.50 / 20.25", "–"],
    ["8 bits", "16,000,000", "2.123", "19.90 / 21.25", "19.50 / 20.25", "43.2 / 9.88"],
    ["change", "−80%", "+0.023", "−0.10 / +0.25", "+0.00 / +0.00", "–"],
]


def test_evaluate_and_bench_say_of_which_weights_their_figures_are(measured):
    for name, run in (("float32", "plain"), ("quantized", "quantized"), ("speed", "quantized")):
        found = json.loads((measured / "results" / "boxed" / f"{name}.json").read_text())
        assert found["fingerprint"] == run_fingerprint(measured / run)
        assert found["bytes"] == run_bytes(measured / run)
        files = (path for path in (measured / run).iterdir() if path.suffix != ".sha256")
        assert found["bytes"] == sum(path.stat().st_size for path in files)
        assert found["quantization"] == (None if run == "plain" else {"bits": 8, "group": None})
        assert found["dtype"] == "float32"
    assert run_fingerprint(measured / "plain") != run_fingerprint(measured / "quantized")


def test_readme_card_and_page_have_the_figures_of_the_results(report, project):
    code, _, err = report()
    assert code == 0
    assert err.count("brought up to date") == 2
    readme, card = (project / "README.md").read_text(), (project / CARD).read_text()
    page = (project / "out" / "report.html").read_text()
    assert cells(readme.partition(TITLE)[2])[2:] == EXPECTED
    assert cells(card)[2:] == EXPECTED
    assert card.startswith(f"# Card\n\n{FIGURES[0]}\n| weights |")
    assert card.endswith(f"{FIGURES[1]}\nlimits\n")
    assert "<h2>The model in the box</h2>" in page
    assert "Not run: Table 1, English to German; Table 2" in readme
    assert "box" not in re.search(r"Not run: [^\n]*", readme)[0]
    for text in (readme, card, page):
        for words in (
            "by multi-query attention: 20.1M parameters, 1 + 1 layers, a vocabulary of 300; ",
            "in the box in 8 bits with a scale a row, 16,000,000 bytes with its tokenizer.",
            f"news.en, 4 sentences, float32 on a scorer; BLEU {SIGNATURE}",
            "news.en in float32 on a chip, 3 threads of 4 cores, text to text, the median of 2",
            "loading took 0.46 s",
            "Training: train.steps=3000, train.warmup=300, train.seed=5; what is not named is",
        ):
            assert words in text
    assert report()[2] == ""
    assert report("--check") == (0, "", "")


def test_check_notices_a_card_that_is_behind_and_writes_nothing(report, project):
    report()
    card = project / CARD
    stale = card.read_text().replace("19.90", "29.90")
    card.write_text(stale)
    code, out, err = report("--check")
    assert (code, out) == (1, "")
    assert err == f"{card} does not say what {project / 'results'} gives; run writehead report\n"
    assert card.read_text() == stale
    assert report()[2] == f"{card}: brought up to date\n"
    assert report("--check")[0] == 0


def test_a_card_can_be_named_and_must_have_its_marks(report, project):
    other = project / "other.md"
    shutil.copyfile(project / CARD, other)
    before = (project / CARD).read_text()
    assert report(f"--card={other}")[0] == 0
    assert cells(other.read_text())[2:] == EXPECTED
    assert (project / CARD).read_text() == before
    other.write_text("no marks\n")
    code, _, err = report(f"--card={other}")
    assert code == 2
    assert f"must have {FIGURES[0]} and {FIGURES[1]} once each" in err


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        (["float32", "quantized", "speed", "train"], "the model in the box."),
        (["speed"], "the model in the box, which lacks boxed/speed.json."),
    ],
)
def test_without_all_files_there_is_no_section_and_it_is_named_as_not_run(
    report, project, missing, words
):
    for name in missing:
        (project / "results" / "boxed" / f"{name}.json").unlink()
    assert report()[0] == 0
    readme = (project / "README.md").read_text()
    assert f"Table 3, language models; {words}\n" in readme
    assert TITLE not in readme
    assert (project / CARD).read_text() == (
        f"# Card\n\n{FIGURES[0]}\nNot run: {words}\n{FIGURES[1]}\nlimits\n"
    )
    assert "<h2>The model" not in (project / "out" / "report.html").read_text()


def spoil(boxed, how):
    """Files on the model in the box with one thing wrong."""
    if how == "cut":
        (boxed / "speed.json").write_text("{")
    elif how == "list":
        (boxed / "train.json").write_text("[]")
    elif how == "greedy only":
        found = json.loads((boxed / "quantized.json").read_text())
        del found["bleu"]["beam-4"]
        (boxed / "quantized.json").write_text(json.dumps(found))
    elif how == "quantized twice":
        shutil.copyfile(boxed / "quantized.json", boxed / "float32.json")
    elif how == "never quantized":
        shutil.copyfile(boxed / "float32.json", boxed / "quantized.json")
    elif how == "text":
        change(boxed / "float32.json", on="other/olds.en")
    elif how == "dtype":
        change(boxed / "float32.json", dtype="bfloat16")
    elif how == "weights":
        change(boxed / "speed.json", fingerprint="0")
    elif how == "training":
        change(boxed / "train.json", model__f=99)
    elif how == "settings":
        change(boxed / "train.json", train="x")
    elif how == "no number":
        change(boxed / "float32.json", ln_ppl=None)
    elif how == "bits":
        change(boxed / "quantized.json", quantization="6")
    elif how == "no speed":
        change(boxed / "speed.json", engines__ours__searches__greedy={})


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("cut", "speed.json is not JSON"),
        ("list", "train.json is damaged"),
        ("greedy only", "quantized.json lacks bleu.beam-4; run `writehead"),
        ("quantized twice", "float32.json is of a quantized run; run `writehead evaluate` again"),
        ("never quantized", "quantized.json is of a run that is not quantized; run `writehead"),
        ("text", "float32.json and quantized.json differ in their text; score both runs alike"),
        ("dtype", "float32.json and quantized.json differ in their dtype"),
        ("weights", "speed.json and quantized.json are of different weights; run `writehead"),
        ("training", "train.json is of another model"),
        ("settings", "train.json is damaged: train is 'x'"),
        ("no number", "float32.json is damaged: ln_ppl is None, which should be a number"),
        ("bits", "quantized.json is damaged: quantization is '6'"),
        ("no speed", "speed.json lacks engines.ours.searches.greedy.sentences_per_second"),
    ],
)
def test_files_that_do_not_fit_together_are_refused_in_a_sentence(report, project, how, words):
    spoil(project / "results" / "boxed", how)
    before = (project / CARD).read_text()
    code, out, err = report()
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err
    assert (project / CARD).read_text() == before


def test_the_same_text_under_another_path_is_the_same_text(report, project):
    change(project / "results" / "boxed" / "float32.json", on="elsewhere/news.en")
    assert report()[0] == 0


def test_the_card_of_the_package_has_every_section_and_one_place_for_figures():
    card = (ROOT / CARD).read_text(encoding="utf-8")
    headings = re.findall(r"^## (.+)$", card, re.MULTILINE)
    assert headings == [
        "What it is",
        "How to use it",
        "What it was trained on",
        "How it was trained",
        "Figures",
        "Its limits",
    ]
    assert card.count(FIGURES[0]) == card.count(FIGURES[1]) == 1
    assert "CC-BY 2.0 FR" in card
    assert "European Parliament" in card
