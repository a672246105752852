"""One display for several trainings, by what their logs say."""

import io
import json

from rich.console import Console

from writehead.demo.board import Board, Course


def write_log(run, *entries):
    run.mkdir(exist_ok=True)
    (run / "log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))


def entry(step, loss=2.0, speed=4321.0):
    return {"step": step, "loss": loss, "tokens_per_second": speed}


def test_the_time_left_follows_from_the_entries_that_came_while_one_looked(tmp_path):
    run = tmp_path / "run"
    course = Course(run, 100)
    assert (course.step, course.line(0.0)) == (0, "starting")
    write_log(run, entry(10))
    course.look(50.0)  # the first comes late, because loading takes its time
    assert course.line(50.0) == "loss=2 tokens/s=4,321"
    write_log(run, entry(10), entry(20), {"step": 20, "dev_ln_ppl": 1.0})
    course.look(55.0)
    assert course.step == 20
    assert course.line(55.0) == "loss=2 tokens/s=4,321 left=0:00:40"  # half a second a step
    assert course.line(65.0).endswith("left=0:00:30")
    course.look(65.0)  # nothing new
    assert course.line(65.0).endswith("left=0:00:30")
    write_log(run, *(entry(step) for step in (10, 20, 100)))
    course.look(95.0)
    assert course.line(95.0).endswith("left=0:00:00")


def test_entries_that_a_crash_left_and_the_run_takes_back_do_not_count(tmp_path):
    run = tmp_path / "run"
    write_log(run, entry(10), entry(20), entry(30))
    course = Course(run, 100)
    assert course.step == 30
    write_log(run, entry(10), entry(20))
    course.look(10.0)
    write_log(run, entry(10), entry(20), entry(40))
    course.look(12.0)
    assert course.line(12.0).endswith("left=0:00:06")


def test_without_a_terminal_a_line_a_run_is_said_now_and_then(tmp_path, monkeypatch):
    times = iter([0.0, 3.0, 10.0, 12.0])
    monkeypatch.setattr("writehead.demo.board.time.monotonic", lambda: next(times))
    runs = {name: tmp_path / name for name in ("multi-head", "multi-query")}
    said = io.StringIO()
    with Board(runs, 100, Console(file=said)) as board:
        write_log(runs["multi-head"], entry(10))
        board.look()
        assert said.getvalue() == ""
        write_log(runs["multi-query"], entry(20, loss=3.0))
        board.look()
        expected = [
            "multi-head: step 10/100 loss=2 tokens/s=4,321",
            "multi-query: step 20/100 loss=3 tokens/s=4,321",
        ]
        assert said.getvalue().splitlines() == expected
    assert said.getvalue().splitlines() == expected * 2  # the end is said too


def test_a_terminal_of_80_columns_shows_a_bar_a_run(tmp_path):
    runs = {name: tmp_path / name for name in ("multi-head", "multi-query")}
    shown = io.StringIO()
    console = Console(file=shown, width=80, force_terminal=True, color_system=None)
    reached = [entry(step, loss=1.234567, speed=123456.7) for step in (1590, 1595, 1600)]
    with Board(runs, 1600, console) as board:
        for count in (1, 2, 3):
            for run in runs.values():
                write_log(run, *reached[:count])
            board.look()
    for name in runs:
        last = shown.getvalue()[shown.getvalue().rindex(name) :].splitlines()[0]
        assert "1600/1600 loss=1.235 tokens/s=123,457 left=0:00:00" in last
