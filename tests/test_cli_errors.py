"""Wrong input of any command is one line and exit code 2, and leaves all files as they were."""

import json
import os
import shutil
from itertools import count
from pathlib import Path
from unittest.mock import Mock
from urllib.error import URLError

import pytest

from texts import save_small_runs
from trainings import pair_dataset

BENCH_RECORD = {"dtype": "", "environment": {"hardware": {"device": ""}}, "rows": []}
DAMAGED_ROW = {"preset": "", "kind": "", "model": {}, "setting": {"batch": "many"}}
TEXTS = {
    "two": "the cat.\na dog.\n",
    "three": "the cat.\na dog.\na bird.\n",
    "blank": "\n  \n",
    "long": "the cat " * 40,
    "books.txt.xz": "some text\n",
    "empty.json": json.dumps(BENCH_RECORD),
    "damaged.json": json.dumps(BENCH_RECORD | {"rows": [DAMAGED_ROW]}),
}
SCORE = "evaluate translation --device=cpu"
TIME = "bench translate translation --device=cpu"
TIME_TRAIN = "bench train --preset=tiny/multi-query --device=cpu"
TRAIN = "train data --preset=tiny/multi-query --run=new --device=cpu"

EXPLAIN = [
    ("explain tiny/multi-head --target=257", "target=257 exceeds the model's 256"),
    ("explain tiny/multi-head --set=model.g=two", "g='two' must be an integer"),
    ("explain tiny/multi-head --set=train.steps=2", "is not model.NAME=VALUE"),
    ("explain wmt14/multiquery", "did you mean 'wmt14/multi-query'?"),
    ("explain wmt14", "unknown preset 'wmt14'; choose from wmt14/multi-head"),
    ("explain tiny/multi-head --batch 0", "batch=0 must be at least 1"),
    ("explain tiny/multi-head --position 128", "from 0 to 127"),
    ("explain tiny/multi-head --chip h2000", "did you mean 'h200'?"),
    ("explain tiny/multi-head --flops -1", "flops=-1.0 must be above 0"),
    ("explain .", "has no config.json"),
    ("explain lm1b/multi-query --source 128", "--source is for translation"),
]
DECODE = [
    ("translate translation --input nowhere", "nowhere cannot be read: No such file"),
    ("translate translation --output .", "an output folder needs files to read"),
    ("generate language Once --output .", ". could not be written: Is a directory"),
    (
        "translate translation --output no/where",
        "no/where could not be written: there is no folder no",
    ),
    ("translate translation --prefix-file -", "cannot be both the text and its prefixes"),
    ("translate translation --beam 99999", "beam=99999 must be at most 300"),
    ("translate translation --seed 3", "--seed is for sampling"),
    ("translate translation --device gpu", "did you mean 'cuda'?"),
    ("translate translation --input data --output two", "two is a file; pass a folder"),
    ("translate translation --max-length=3 --min-length=9", "min_length=9 exceeds max_length=3"),
    ("translate translation --quantize=int8 --dtype=float64", "not float64 on cpu"),
    ("translate translation --threads 0", "threads=0 must be"),
    ("translate two", "no run at 'two'"),
    (["translate", "The cat sees\nthe dog."], r"no run at 'The cat sees\nthe dog.'"),
    (["translate", "x" * 3000], "x…"),
    (["generate", "language", "the " * 40], "prompt 1 has 40 tokens"),
    (["generate", "language", "\udcff"], "prompt 1 is not UTF-8"),
    ("generate language Once --input two", "not both"),
]
PREPARE = [
    ("prepare new --source three --target two", "three and two have different numbers of lines"),
    ("prepare new --source three --target latin", "latin is not UTF-8 in line 1"),
    ("prepare new --source two --target two --vocab-size 275", "identical: 2"),
    ("prepare new --text pipe", "pipe is not a regular file"),
    ("prepare new --source two --target none", "none cannot be read: No such file"),
    ("prepare new --source two", "1 source files"),
    ("prepare new --source two --target two --text three", "--source and --target and --text"),
    ("prepare new", "no text given"),
    ("prepare new --text blank", "every line is empty"),
    ("prepare new --text two --dev-source two", "--dev-source requires --source and --target"),
    ("prepare new --text two --pair en-de", "--pair requires --hub"),
    ("prepare new --embedded --pairs 0", "pairs=0"),
    ("prepare new --hub .", "no parquet files"),
]
TRAINING = [
    (f"{TRAIN} --set=train.stepz=3", "did you mean 'steps'?"),
    (f"{TRAIN} --set=train.steps", "train.NAME=VALUE"),
    (f"{TRAIN} --set=train.steps={'x' * 10**6}", "must be an integer"),
    (f"{TRAIN} --set=train.clip=NaN", "NaN"),
    (f"{TRAIN} --set=train.accumulate=3", "accumulate=3"),
    (f"{TRAIN} --set=train.average=4", "keep"),
    (f"{TRAIN} --set=train.target_length=257", "target_length=257"),
    (f"{TRAIN} --set=train.target_length=2", "fits in a row"),
    (f"{TRAIN} --set=model.eos=5", "model.eos=1"),
    (f"{TRAIN} --set=model.vocab_size=9", "prepare the dataset with another --vocab-size"),
    (f"{TRAIN} --preset=tiny/multi-quary", "did you mean 'tiny/multi-query'?"),
    (f"{TRAIN} --device=cuda:99", "error: "),
    (f"{TRAIN} --set=train.distill=0.3", "need --teacher"),
    (
        f"{TRAIN} --preset=tiny-lm/multi-query",
        "translation model, but the model to train is a lang",
    ),
    ("train data --init=translation --run=new", "--set train.steps=N"),
    ("serve language --languages=en-de", "is a language model"),
    ("bench serve http://localhost:1 --duration=1", "no server answers at"),
]
EVALUATE = [
    (f"{SCORE} --source=two", "--source with --reference"),
    (f"{SCORE} --dataset=data --text=two", "give one of"),
    (f"{SCORE} --dataset=data", "no split 'test'; choose one: --split dev"),
    (f"{SCORE} --split=dev --text=two", "--split needs --dataset"),
    (f"{SCORE} --source=three --reference=two", "3 source lines have 2 references"),
    (f"{SCORE} --source=none --reference=two", "cannot be read"),
    (f"{SCORE} --source=two --reference=two --output=.", "not a regular file"),
    (f"{SCORE} --text=two", "scored on pairs"),
    (f"{SCORE} --source=two --reference=two --search=beam-5", "did you mean 'beam-4'?"),
    (f"{SCORE} --test-set=wmt-14", "did you mean 'wmt14'?"),
    (f"{SCORE} --test-set=wmt14", "could not be downloaded"),
]
QUANTIZE = [
    ("quantize nowhere new", "there is no run at nowhere"),
    ("quantize translation translation", "translation exists"),
    ("quantize translation translation --force", "choose another folder"),
    ("quantize translation quantized --force", "more than a run"),
    ("quantize translation new --bits=7", "bits=7"),
    ("quantize quantized new", "quantized already has 8 bits"),
    ("quantize translation translation/config.json/new", "could not be written"),
]
BENCH = [
    ("bench attention --shape=3,7", "b,m,g"),
    ("bench attention --shape=0,7,1", "at least 1"),
    ("bench attention --shape=3,7,3", "must divide h=8"),
    ("bench attention --shape=1,2,1 --output=two", "two exists"),
    ("bench decode --preset=tiny/multi-quary --device=cpu", "did you mean"),
    ("bench decode --length=257 --device=cpu", "tiny/multi-head has fewer positions than 257"),
    ("bench decode --length=0 --device=cpu", "target=0"),
    (f"{TIME} --input=two --dtype=float31", "float31"),
    (f"{TIME} --input=nowhere", "nowhere"),
    (f"{TIME} --input=blank", "no line"),
    (f"{TIME} --input=two --beam=9000", "beam=9000"),
    (f"{TIME} --input=two --output=three", "three exists"),
    ("bench translate nowhere --input=two --device=cpu", "nowhere"),
    (f"{TIME_TRAIN} --output=/dev/null/x.json", "/dev/null"),
    (f"{TIME_TRAIN} --output=two", "two exists"),
    ("bench train --preset=tiny-lm/multi-query --device=cpu", "needs a dataset"),
    (f"{TIME_TRAIN} --set=model.vocab_size=300 --dataset=data", "choose another dataset"),
    ("bench plot long new", "not JSON"),
    ("bench plot empty.json new", "has no rows"),
    ("bench plot damaged.json new", "batch"),
]
REPRODUCE = [
    ("reproduce table1 --only=multi-qery", "did you mean 'multi-query'?"),
    ("reproduce table2 --only=multi-head-1x128", "table2 has no row 'multi-head-1x128'"),
    ("report --results nowhere", "nowhere is not a folder"),
    ("reproduce table4", "'table4'"),
    ("reproduce table1 --scale=smal", "did you mean 'small'?"),
    ("reproduce table2 --steps=3", "--steps is for table1 and table3"),
    ("reproduce table1 --seeds=1,-1", "1,-1"),
    ("reproduce table1 --set=model.g=2", "train.NAME=VALUE"),
    ("reproduce table1 --scale=paper --data=nowhere", "nowhere"),
    ("reproduce table1 --scale=tiny --results=two", "two"),
    ("reproduce table3 --data=.", ". lacks books.valid.txt"),
    ("reproduce table1", "newstest2014.en, newstest2014.de"),
]
COMMANDS = EXPLAIN + DECODE + PREPARE + TRAINING + EVALUATE + QUANTIZE + BENCH + REPRODUCE


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Texts, runs and a dataset."""
    folder = tmp_path_factory.mktemp("given")
    save_small_runs(folder)
    shutil.move(pair_dataset(tmp_path_factory.mktemp("pairs")), folder / "data")
    for name, text in TEXTS.items():
        (folder / name).write_text(text)
    (folder / "quantized" / "notes").write_text("mine")
    (folder / "latin").write_bytes("für\nschön\nüber\n".encode("latin-1"))
    os.mkfifo(folder / "pipe")
    return folder


def state(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("command", "words"), COMMANDS, ids=count())
def test_wrong_input_is_one_line_and_changes_nothing(folder, refused, monkeypatch, command, words):
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sacrebleu.get_source_file", Mock(side_effect=URLError("no network")))
    monkeypatch.setattr("writehead.bench.floor.measure_chip", None)  # nothing is measured
    before = state(folder)
    arguments = command.split() if isinstance(command, str) else command
    error = refused(*arguments, stdin=b"the cat.\n")
    assert words in error.replace(f"{folder}/", "")
    assert len(error) < 2100
    assert state(folder) == before


def test_a_full_device_and_torchrun_are_refused(folder, refused, monkeypatch):
    if os.path.exists("/dev/full"):
        command = ("translate", folder / "translation", "--output", "/dev/full", "--device=cpu")
        assert "No space left on device" in refused(*command, stdin=b"a")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "once per GPU" in refused("reproduce", "table1")
