"""One display for several trainings, by what their logs say."""

import io
import json

import pytest
from rich.console import Console

from writehead.demo.board import Board, Course


def write_log(run, *steps):
    run.mkdir(exist_ok=True)
    entries = ({"step": step, "loss": 2.0, "tokens_per_second": 4321.0} for step in steps)
    (run / "log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))


def test_the_time_left_follows_from_the_steps_seen(tmp_path):
    run = tmp_path / "run"
    write_log(run, 10, 20, 30)
    course = Course(run, 100)
    assert course.step == 30
    write_log(run, 10)  # a crashed run resumes from its checkpoint
    course.look(50.0)
    assert "left" not in course.line(50.0)
    write_log(run, 10, 20)
    course.look(55.0)
    assert course.line(55.0).endswith("left=0:00:40")  # half a second per step
    assert course.line(65.0).endswith("left=0:00:30")
    write_log(run, 10, 20, 100)
    course.look(95.0)
    assert course.line(95.0).endswith("left=0:00:00")


@pytest.mark.parametrize("terminal", [False, True])
def test_every_run_is_shown_with_its_last_step(tmp_path, terminal):
    runs = {name: tmp_path / name for name in ("multi-head", "multi-query")}
    shown = io.StringIO()
    console = Console(file=shown, width=80, force_terminal=terminal, color_system=None)
    with Board(runs, 1600, console) as board:
        for run in runs.values():
            write_log(run, 1590, 1600)
        board.look()
    for name in runs:
        last = shown.getvalue()[shown.getvalue().rindex(name) :].splitlines()[0]
        assert "1600/1600 loss=2 tokens/s=4,321" in last
