"""results/distill.sh with tiny models: step by step, and then all steps again."""

import gzip
import json
import lzma
import os
import subprocess
import sys
from pathlib import Path

import pytest

from writehead.data.corpus import pairs
from writehead.data.dataset import Dataset
from writehead.training.first_lines import read_first_lines

SCRIPT = Path(__file__).parents[2] / "results" / "distill.sh"
STEPS = ("prepare", "teacher", "translate", "mix", "student", "quantize", "score")
SHORT = "--set train.steps=3 --set train.warmup=1 --set train.evaluate_sequences=5"
SETTINGS = {
    "PYTHON": sys.executable,
    "TEACHER": f"--preset tiny/multi-head {SHORT}",
    "STUDENT": f"--preset tiny/multi-query {SHORT}",
    "TEACHER_VOCAB": "400",
    "STUDENT_VOCAB": "380",
}


def distill(*arguments):
    environment = os.environ | SETTINGS
    done = subprocess.run(
        [SCRIPT, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stderr


def write(folder, name, rows):
    folder.mkdir(exist_ok=True)
    for language, lines in zip(("en", "de"), zip(*rows, strict=True), strict=True):
        text = "".join(f"{line}\n" for line in lines).encode()
        (folder / f"{name}.{language}.xz").write_bytes(lzma.compress(text))


def texts(folder):
    dataset = Dataset.open(folder)
    train, decode = dataset.split("train"), dataset.tokenizer.decode
    return [(decode(train.source[i]), decode(train.target[i])) for i in range(len(train))]


@pytest.mark.slow
def test_the_recipe_runs_step_by_step_and_again(tmp_path):
    text, output, greeting = tmp_path / "text", tmp_path / "out", read_first_lines()[0].source
    rows, held_out = [*pairs("train", 200)], [*pairs("dev", 12)]
    write(text, "europarl", [*rows[:120], held_out[0], (f"{greeting}!", "Hallo")])
    write(text / "more", "ui", rows[120:])
    (text / "books.en.gz").write_bytes(gzip.compress(b"The old man sees a cat.\n" * 2))
    for name, part in (("newstest2013", held_out[8:]), ("newstest2014", held_out[:8])):
        for language, lines in zip(("en", "de"), zip(*part, strict=True), strict=True):
            (text / f"{name}.{language}").write_text("".join(f"{line}\n" for line in lines))
    for step in STEPS:
        assert distill(text, output, step)[0] == 0, step
    model = (output / "en-de" / "model.safetensors").read_bytes()
    human, mixed = texts(output / "teacher-data"), texts(output / "student-data")
    assert 120 + 3 * 80 <= len(human) <= 120 + 4 * 80  # at most a few pairs are filtered
    sources, speeches, ui = (
        {source for source, _ in one} for one in (mixed, rows[:120], rows[120:])
    )
    assert sources & speeches
    assert not {*mixed} & {*rows[:120]}  # only the teacher's translations of the large corpus
    assert {*mixed} & {*rows[120:]}
    assert len(mixed) > len(ui) * 4
    assert not {text.lower() for text in sources} & {held_out[0][0].lower(), f"{greeting}!".lower()}
    assert len([*(output / "translated").glob("*.en")]) == 3
    names = {path.stem for path in (output / "results").iterdir()}
    assert names >= {"before-int8", "before-first-lines", "first-lines", "float32", "speed"}
    scores = json.loads((output / "results" / "int8.json").read_text())
    assert scores["sentences"] == 8
    assert distill(text, output) == (0, distill(text, output)[1])
    assert (output / "en-de" / "model.safetensors").read_bytes() == model


def test_wrong_arguments_are_refused(tmp_path):
    code, err = distill()
    assert (code, "usage: " in err) == (1, True)
    code, err = distill(tmp_path, tmp_path / "out", "teach")
    assert (code, "unknown step teach; choose from prepare, teacher" in err) == (2, True)
