"""Writers of runs and results: complete or nothing, the first one wins, no leftovers."""

import json
import os
import shutil

import pytest
import torch

from texts import engine, names
from writehead.bench.record import check_output, write_result
from writehead.errors import RunError
from writehead.interop import quantize
from writehead.interop.quantize import quantize_run
from writehead.runs import load_run, save_run
from writehead.runs.folder import read_quantization
from writehead.util.environment import environment


@pytest.fixture
def run(small_runs):
    return small_runs / "translation"


def test_the_first_of_two_writers_of_a_run_wins(run, tmp_path, monkeypatch, refused):
    place, original = tmp_path / "new", quantize.quantize_tensors

    def slow(*given):
        save_run(place, engine("language").model)  # as another process would meanwhile
        return original(*given)

    monkeypatch.setattr(quantize, "quantize_tensors", slow)
    assert f"another process has written {place}" in refused("quantize", run, place)
    assert load_run(place).model.config.task == "language"
    assert names(tmp_path) == ["new"]


def test_a_killed_replacement_keeps_one_of_both_runs(run, tmp_path):
    place = tmp_path / "new"
    for killed in ("before", "after"):  # the new run was in place
        save_run(tmp_path / ".new.0123abcd.old", load_run(run).model)
        if killed == "before":
            with pytest.raises(RunError, match=r"\.new\.0123abcd\.old: move it back"):
                load_run(place)
        quantize_run(run, place, overwrite=True)
        assert read_quantization(place) is not None
        save_run(tmp_path / ".new.4567cdef.old", load_run(run).model)
        quantize_run(run, place, overwrite=True)
        assert names(tmp_path) == ["new"]


@pytest.mark.parametrize("partial", [False, True])
def test_the_first_of_two_results_wins_unless_the_other_is_forced(tmp_path, partial):
    path = tmp_path / "result.json"
    if partial:
        write_result(path, {"bench": "decode", "partial": True})
        with pytest.raises(RunError, match="exists"):
            check_output(path, False, "attention")
    first, second = (check_output(path, False, "decode") for _ in range(2))
    for number in (1, 2):  # as a benchmark does after each row
        first.write({"bench": "decode", "number": number})
    with pytest.raises(RunError, match="another process has written"):
        second.write({"number": 3})
    assert '"number": 2' in path.read_text()
    check_output(path, True, "decode").write({"number": 3})
    assert '"number": 3' in path.read_text()
    assert names(tmp_path) == ["result.json"]


def test_special_files_are_not_replaced_and_a_link_stays_one(tmp_path):
    pipe, loop, link, file = (tmp_path / name for name in ("pipe", "loop", "link.json", "file"))
    os.mkfifo(pipe)
    loop.symlink_to("loop")
    file.touch()
    for path in (pipe, loop, file / "x.json", tmp_path):
        with pytest.raises(RunError, match=str(tmp_path)):
            check_output(path, True)
    link.symlink_to("there/target.json")
    for number in range(2):  # a link to nothing yet, and one to a file
        check_output(link, number == 1)
        write_result(link, {"number": number})
        assert link.is_symlink()
        assert json.loads((tmp_path / "there" / "target.json").read_text()) == {"number": number}


def test_the_commit_may_come_from_a_variable(monkeypatch):
    monkeypatch.setenv("WRITEHEAD_COMMIT", "0123abc")
    assert environment(torch.device("cpu"))["commit"].startswith("0123abc")
    monkeypatch.setenv("WRITEHEAD_COMMIT", "")
    assert environment(torch.device("cpu"))["commit"] != ""


def test_quantize_makes_a_smaller_run_and_replaces_one_if_forced(writehead, run, tmp_path):
    sizes = []
    for options, expected in (
        ([], (8, None)),
        (["--bits=4"], (4, 32)),
        (["--bits=5", "--group=0"], (5, None)),
    ):
        code, out, err = writehead("quantize", run, tmp_path / "small", *options, "--force")
        assert (code, out, err.count("\n")) == (0, "", 1)
        config = read_quantization(tmp_path / "small")
        assert (config.bits, config.group) == expected
        sizes.append((tmp_path / "small" / "model.safetensors").stat().st_size)
    assert sizes[1] < sizes[0] < (run / "model.safetensors").stat().st_size


def test_a_checkpoint_is_quantized_without_optimizer_state(writehead, small_runs, tmp_path):
    checkpoint = tmp_path / "training" / "checkpoints" / "step-00000007"
    shutil.copytree(small_runs / "translation", checkpoint)
    (checkpoint / "optimizer.safetensors").write_bytes(b"moments")
    code, _, err = writehead("quantize", tmp_path / "training", tmp_path / "small")
    assert (code, "step-00000007" in err) == (2, True)
    assert writehead("quantize", checkpoint, tmp_path / "small")[0] == 0
    files = ["checksums.sha256", "config.json", "model.safetensors", "tokenizer.model"]
    assert names(tmp_path / "small") == files
