import html
import json
import re
from dataclasses import replace

from writehead.decoding import Engine
from writehead.demo.opening import SENTENCES
from writehead.demo.run import Demo
from writehead.training.checkpoint import list_checkpoints

TRAIN = replace(Demo().train, steps=2, log_every=1, evaluate_every=2, checkpoint_every=2, warmup=1)
SMALL = Demo(pairs=200, vocab_size=400, held_out=4, train=TRAIN)


def test_the_demo_trains_scores_times_and_reports_both_kinds_and_resumes(
    tmp_path, monkeypatch, writehead, bundled
):
    folder, page = tmp_path / "demo", tmp_path / "demo" / "report.html"
    command = ("demo", "--folder", folder, "--device=cpu")
    monkeypatch.setattr("writehead.demo.run.Demo", lambda: SMALL)
    for name, value in (("TURNS", 1), ("POSITIONS", (3, 7)), ("BATCH", 2), ("SOURCE", 8)):
        monkeypatch.setattr(f"writehead.demo.timing.{name}", value)
    code, out, err = writehead(*command)
    assert code == 0, err
    text = page.read_text(encoding="utf-8")
    assert re.findall(r"^(\d)\. ", err, re.MULTILINE) == ["1", "2", "3", "4", "5"]
    answers = Engine.load(bundled, device="cpu").translate(SENTENCES)
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

    def interrupted(*given):
        raise KeyboardInterrupt

    trained = [list_checkpoints(folder / kind)[-1][1].stat().st_mtime_ns for kind in kinds]
    monkeypatch.setattr("writehead.model.bundled.BUNDLED", tmp_path / "none")
    monkeypatch.setattr("writehead.demo.run.evaluate_translation", interrupted)
    code, out, _ = writehead(*command)
    assert (code, SENTENCES[0] in out) == (130, False)
    again = [list_checkpoints(folder / kind)[-1][1].stat().st_mtime_ns for kind in kinds]
    assert again == trained

    # with a thread for each, both are trained at once
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    monkeypatch.setattr("writehead.demo.run.train_together", interrupted)
    assert writehead(*command)[0] == 130
