"""One display for several trainings, by what their logs say."""

import io
import json

from rich.console import Console

from writehead.demo.board import Board, Course


def write_log(run, *steps):
    run.mkdir(exist_ok=True)
    entries = ({"step": step, "loss": 2.0, "tokens_per_second": 4321.0} for step in steps)
    (run / "log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))


def test_the_time_left_follows_from_the_steps_seen_and_every_run_is_shown(tmp_path):
    write_log(tmp_path / "run", 10, 20, 30)
    course = Course(tmp_path / "run", 100)
    for steps, seconds, left in (
        ([10], 50.0, "4,321"),  # a crashed run resumes from its checkpoint
        ([10, 20], 55.0, "left=0:00:40"),  # half a second per step
        ([10, 20, 100], 95.0, "left=0:00:00"),
    ):
        write_log(tmp_path / "run", *steps)
        course.look(seconds)
        assert course.line(seconds).endswith(left)
    for terminal in (False, True):
        shown = io.StringIO()
        console = Console(file=shown, width=80, force_terminal=terminal, color_system=None)
        with Board({"multi-query": tmp_path / "run"}, 100, console) as board:
            board.look()
        last = shown.getvalue()[shown.getvalue().rindex("multi-query") :].splitlines()[0]
        assert "100/100" in last
