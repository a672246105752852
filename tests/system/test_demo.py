import dataclasses
import html
import json
import re

from writehead.decoding import Engine
from writehead.demo import run_demo
from writehead.demo.opening import SENTENCES
from writehead.demo.run import Demo, _one_thread
from writehead.demo.table import table_rows
from writehead.paper.frame import STYLE
from writehead.training.checkpoint import list_checkpoints

SMALL = Demo(pairs=400, vocabulary=400, held_out=12)
SMALL = dataclasses.replace(
    SMALL,
    train=dataclasses.replace(
        SMALL.train, steps=4, log_every=1, evaluate_every=2, checkpoint_every=2, warmup=1
    ),
)


def assert_opens_with(run, out, err, page):
    """What was said and written begins with our sentences as the engine of a run has them."""
    assert err.startswith("1. The model in the box translates, English to German, beam 4\n2. A")
    assert out.split()[:2] == ["English", "German"]
    answers = Engine.load(run, device="cpu").translate(SENTENCES)
    for pair in zip(SENTENCES, (answer.text for answer in answers), strict=True):
        assert "".join(f"<td>{html.escape(text)}</td>" for text in pair) in page
        assert all(word in out for text in pair for word in text.split())
    took = re.search(r"Loaded in \d+\.\d s; 4 sentences translated in \d+\.\d s\.", out)
    assert took[0] in page


def test_the_demo_trains_scores_times_and_reports_both_kinds_and_goes_on(
    tmp_path, capsys, monkeypatch, boxed
):
    folder = tmp_path / "demo"
    page = run_demo(folder, SMALL, device="cpu")
    out, err = capsys.readouterr()
    assert_opens_with(boxed, out, err, page.read_text(encoding="utf-8"))
    assert re.findall(r"^(\d)\. ", err, re.MULTILINE) == ["1", "2", "3", "4", "5"]
    assert "multi-head" in out
    assert "the paper's" in out
    assert "9.0×" in out
    results = json.loads((folder / "demo.json").read_text())
    sizes = {model["parameters"] for model in results["models"].values()}
    assert len(sizes) == 1
    kinds = results["steps"]["kinds"]
    assert kinds["multi-head"]["kv_bytes"] == 8 * kinds["multi-query"]["kv_bytes"]
    assert all(value > 0 for search in results["decoding"].values() for value in search.values())
    text = page.read_text(encoding="utf-8")
    assert text.count("<svg") == 3
    assert not re.search(r"(src|href)=[\"']?https?:", text)
    assert STYLE in text
    assert re.findall("<dt>(.*?)</dt>", text) == table_rows(results)[0]  # each column is explained

    trained = [list_checkpoints(folder / kind)[-1][1].stat().st_mtime_ns for kind in kinds]
    (folder / "demo.json").unlink()
    monkeypatch.setattr("writehead.model.boxed.BOXED", tmp_path / "none")
    run_demo(folder, SMALL, device="cpu")
    assert (folder / "demo.json").is_file()
    out, err = capsys.readouterr()
    assert err.startswith("1. The model in the box is not here: this writehead has none\n2. A")
    assert "in the box" not in out + page.read_text(encoding="utf-8")
    again = [list_checkpoints(folder / kind)[-1][1].stat().st_mtime_ns for kind in kinds]
    assert again == trained


def test_with_two_threads_both_kinds_are_trained_at_once_with_one_each(
    tmp_path, monkeypatch, writehead, empty_box
):
    asked = []

    def interrupted(trainings, threads, console):
        asked.append((list(trainings), threads))
        return False

    monkeypatch.setattr("writehead.demo.run.train_together", interrupted)
    monkeypatch.setattr("writehead.demo.run.Demo", lambda: SMALL)
    monkeypatch.setattr("torch.get_num_threads", lambda: 3)
    code, _, err = writehead("demo", "--folder", tmp_path / "demo", "--device=cpu")
    assert asked == [(["multi-head", "multi-query"], 1)]
    assert code == 130
    assert err.endswith("interrupted; run the same command again to go on\n")


def test_decoding_is_scored_and_timed_by_one_thread_and_the_others_come_back(monkeypatch):
    counts = [4]
    monkeypatch.setattr("torch.get_num_threads", lambda: counts[-1])
    monkeypatch.setattr("torch.set_num_threads", counts.append)
    with _one_thread():
        assert counts == [4, 1]
    assert counts == [4, 1, 4]
