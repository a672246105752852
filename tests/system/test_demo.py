import html
import json
import re
from dataclasses import replace

from writehead.decoding import Engine
from writehead.demo import run_demo
from writehead.demo.opening import SENTENCES
from writehead.demo.run import Demo
from writehead.training.checkpoint import list_checkpoints

TRAIN = replace(Demo().train, steps=2, log_every=1, evaluate_every=2, checkpoint_every=2, warmup=1)
SMALL = Demo(pairs=200, vocabulary=400, held_out=4, train=TRAIN)


def test_the_demo_trains_scores_times_and_reports_both_kinds_and_resumes(
    tmp_path, capsys, monkeypatch, boxed
):
    folder = tmp_path / "demo"
    page = run_demo(folder, SMALL, device="cpu")
    text, (out, err) = page.read_text(encoding="utf-8"), capsys.readouterr()
    assert re.findall(r"^(\d)\. ", err, re.MULTILINE) == ["1", "2", "3", "4", "5"]
    answers = Engine.load(boxed, device="cpu").translate(SENTENCES)
    for pair in zip(SENTENCES, (answer.text for answer in answers), strict=True):
        assert "".join(f"<td>{html.escape(one)}</td>" for one in pair) in text
        assert all(word in out for one in pair for word in one.split())
    assert "multi-head" in out
    results = json.loads((folder / "demo.json").read_text())
    assert len({model["parameters"] for model in results["models"].values()}) == 1
    kinds = results["steps"]["kinds"]
    assert kinds["multi-head"]["kv_bytes"] == 8 * kinds["multi-query"]["kv_bytes"]
    assert all(value > 0 for search in results["decoding"].values() for value in search.values())
    assert text.count("<svg") == 3
    assert not re.search(r"(src|href)=[\"']?https?:", text)

    trained = [list_checkpoints(folder / kind)[-1][1].stat().st_mtime_ns for kind in kinds]
    (folder / "demo.json").unlink()
    monkeypatch.setattr("writehead.model.boxed.BOXED", tmp_path / "none")
    run_demo(folder, SMALL, device="cpu")
    assert (folder / "demo.json").is_file()
    assert html.escape(SENTENCES[0]) not in page.read_text(encoding="utf-8")
    again = [list_checkpoints(folder / kind)[-1][1].stat().st_mtime_ns for kind in kinds]
    assert again == trained


def test_both_kinds_are_trained_at_once_where_there_are_threads_for_both(
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
    assert (code, "run the same command again" in err) == (130, True)
