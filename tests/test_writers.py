"""Writers of runs and results: complete or nothing, the first one wins, no leftovers."""

import errno
import os
import resource
import shutil
import signal
from pathlib import Path

import pytest

from texts import engine, save_small_runs, tokenizer
from writehead.bench.record import check_output, write_result
from writehead.errors import DataError, RunError
from writehead.model import load_run, quantize_run, runs, save_run
from writehead.model.runs import read_quantization
from writehead.training import checkpoint
from writehead.training.checkpoint import average_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return save_small_runs(tmp_path_factory.mktemp("runs"))[0]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write_first(monkeypatch, module, name, place):
    """Lets another process write the run at `place` while a function of `module` is at work."""
    work = getattr(module, name)

    def slow(*given, **options):
        if not place.exists():
            save_run(place, engine("language").model)
        return work(*given, **options)

    monkeypatch.setattr(module, name, slow)


def test_the_first_of_two_writers_of_a_run_wins(run, tmp_path, monkeypatch, writehead):
    place = tmp_path / "new"
    write_first(monkeypatch, runs, "quantize_tensors", place)
    code, out, err = writehead("quantize", run, place)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"another process has written {place}" in err
    assert read_quantization(place) is None
    assert load_run(place).model.config.task == "language"
    assert names(tmp_path) == ["new"]


def test_the_first_of_two_averages_wins(run, tmp_path, monkeypatch):
    trained, place = tmp_path / "trained", tmp_path / "new"
    shutil.copytree(run, trained / "checkpoints" / "step-00000001")
    write_first(monkeypatch, checkpoint, "average_weights", place)
    with pytest.raises(RunError, match="another process has written"):
        average_run(trained, place, 1)
    assert load_run(place).model.config.task == "language"
    assert names(tmp_path) == ["new", "trained"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_quantize_leaves_nothing(run, tmp_path, monkeypatch, writehead, number):
    monkeypatch.setattr(runs, "quantize_tensors", lambda *_: os.kill(os.getpid(), number))
    try:
        assert writehead("quantize", run, tmp_path / "new")[0] == 128 + number
    except KeyboardInterrupt:
        assert number == signal.SIGINT
    assert names(tmp_path) == []


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


def test_a_full_disk_is_an_error_that_names_the_run(run, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/tmp/.hidden")

    for name in ("write_model", "copy_tokenizer"):
        monkeypatch.setattr(runs, name, full)
        with pytest.raises(RunError) as caught:
            quantize_run(run, tmp_path / "new")
        assert str(tmp_path / "new") in str(caught.value)
        assert "No space left on device" in str(caught.value)
        monkeypatch.undo()
    assert names(tmp_path) == []


def test_a_file_size_limit_is_an_error_that_names_the_run(tmp_path):
    model, (soft, hard) = engine("language").model, resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(RunError, match=r"new could not be written: .*File too large"):
            save_run(tmp_path / "new", model)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert names(tmp_path) == []


@pytest.mark.parametrize("force", [False, True])
def test_the_first_of_two_results_wins_unless_the_other_is_forced(tmp_path, force):
    path = tmp_path / "result.json"
    files = [check_output(path, force, "decode") for _ in range(2)]
    for number in (1, 2):  # as a bench does while it goes on
        files[0].write({"bench": "decode", "number": number})
    if force:
        files[1].write({"number": 3})
    else:
        with pytest.raises(RunError, match="another process has written"):
            files[1].write({"number": 3})
    assert f'"number": {3 if force else 2}' in path.read_text()
    assert names(tmp_path) == ["result.json"]


def test_a_partial_result_is_replaced_by_one_process_only(tmp_path):
    path = tmp_path / "result.json"
    write_result(path, {"bench": "decode", "partial": True})
    files = [check_output(path, False, "decode") for _ in range(2)]
    files[0].write({"bench": "decode"})
    with pytest.raises(RunError, match="another process has written"):
        files[1].write({"bench": "decode", "late": True})
    assert "late" not in path.read_text()


def test_of_two_evaluations_the_first_result_is_kept(run, tmp_path, monkeypatch, writehead):
    text, path = tmp_path / "text", tmp_path / "result.json"
    text.write_text("the cat.\n")
    from writehead.training import evaluate

    score = evaluate.evaluate_translation

    def slow(*given, **options):
        write_result(path, {"first": True})
        return score(*given, **options)

    monkeypatch.setattr(evaluate, "evaluate_translation", slow)
    options = ("--source", text, "--reference", text, "--device=cpu", "--search=greedy")
    code, _, err = writehead("evaluate", run, *options, "--output", path)
    assert code == 2
    assert "another process has written" in err
    assert "first" in path.read_text()
    assert writehead("evaluate", run, *options, "--output", path, "--force")[0] == 0
    assert "ln_ppl" in path.read_text()


def test_a_tokenizer_is_written_whole(tmp_path):
    tokenizer().save(tmp_path / "bpe")
    assert names(tmp_path) == ["bpe"]
    assert (tmp_path / "bpe").read_bytes() == tokenizer().model
    with pytest.raises(DataError, match="none/bpe could not be written: No such file"):
        tokenizer().save(tmp_path / "none" / "bpe")
