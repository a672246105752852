"""What is written of a result can be read again, by whoever reads JSON."""

import json
import math
import os

import pytest

from writehead.bench.record import check_output, write_result
from writehead.errors import RunError


def test_what_another_bench_left_is_not_replaced_unasked(tmp_path):
    path = tmp_path / "result.json"
    write_result(path, {"bench": "decode", "partial": True})
    check_output(path, False, "decode")
    for other in ("attention", None):
        with pytest.raises(RunError, match="exists; choose another place"):
            check_output(path, False, other)
        check_output(path, True, other)


def test_what_is_no_file_is_not_replaced_and_a_link_stays_one(tmp_path):
    pipe, link, folder = tmp_path / "pipe", tmp_path / "link.json", tmp_path / "file.json"
    os.mkfifo(pipe)
    for force in (False, True):
        with pytest.raises(RunError, match="is a pipe or a device, which nothing replaces"):
            check_output(pipe, force)
    folder.touch()
    with pytest.raises(RunError, match=r"file.json is no folder, and one is wanted"):
        check_output(folder / "x.json", False)
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    with pytest.raises(RunError, match="loop could not be written"):
        check_output(loop, False)
    link.symlink_to("there/target.json")
    for number in range(2):  # a link that leads nowhere yet, and one that leads to a file
        check_output(link, number == 1)
        write_result(link, {"number": number})
        assert link.is_symlink()
        assert json.loads((tmp_path / "there" / "target.json").read_text()) == {"number": number}


def test_numbers_that_json_cannot_say_are_null(tmp_path):
    path = tmp_path / "result.json"
    scores = {"ppl": math.inf, "log": [{"loss": math.nan}, (1.5, -math.inf)], "steps": 3}
    write_result(path, {"scores": scores, "name": "a run"})
    read = json.loads(path.read_text(), parse_constant=pytest.fail)
    log = [{"loss": None}, [1.5, None]]
    assert read == {"scores": {"ppl": None, "log": log, "steps": 3}, "name": "a run"}
