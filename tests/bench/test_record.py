"""A result can be read again by whoever reads JSON, and replaces nothing unasked."""

import json
import os

import pytest
import torch

from writehead.bench.record import check_output, write_result
from writehead.errors import RunError
from writehead.util.environment import environment


def test_a_partial_result_of_another_bench_is_not_replaced_unasked(tmp_path):
    path = tmp_path / "result.json"
    write_result(path, {"bench": "decode", "partial": True})
    check_output(path, False, "decode")
    with pytest.raises(RunError, match="exists"):
        check_output(path, False, "attention")
    check_output(path, True, "attention")


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
    facts = environment(torch.device("cpu"))
    assert facts["commit"].startswith("0123abc")
    assert json.loads(json.dumps(facts)) == facts
    monkeypatch.setenv("WRITEHEAD_COMMIT", "")
    assert environment(torch.device("cpu"))["commit"] != ""
