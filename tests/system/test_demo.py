import json
import re
from dataclasses import replace

import pytest

from writehead.demo.run import KINDS, SAMPLES, Demo
from writehead.engine import Engine
from writehead.training.checkpoint import list_checkpoints

TRAIN = replace(Demo().train, steps=2, log_every=1, evaluate_every=2, checkpoint_every=2, warmup=1)
SMALL = Demo(200, 7, 400, 4, 2, TRAIN, repeats=1, batch=2, source=8, positions=(3, 7))


@pytest.fixture
def demo(tmp_path, monkeypatch, writehead):
    """Runs a small demo: exit code, standard output, standard error."""
    monkeypatch.setattr("writehead.demo.run.Demo", lambda: SMALL)
    return lambda: writehead("demo", "--folder", tmp_path / "demo", "--device=cpu")


def test_the_demo_trains_writes_a_page_and_resumes(tmp_path, monkeypatch, demo, bundled):
    folder = tmp_path / "demo"
    code, out, err = demo()
    assert code == 0, err
    page = (folder / "report.html").read_text(encoding="utf-8")
    answers = Engine.load(bundled, device="cpu").translate(SAMPLES)
    for pair in zip(SAMPLES, (answer.text for answer in answers), strict=True):
        assert all(word in out for text in pair for word in text.split())
    assert page.count("<svg") == 1
    assert not re.search(r"(src|href)=[\"']?https?:", page)
    models = json.loads((folder / "demo.json").read_text())["models"]
    assert models["multi-head"]["parameters"] == models["multi-query"]["parameters"]
    kv_bytes = [models[kind]["kv_bytes_per_token"] for kind in KINDS]
    assert kv_bytes[0] == 8 * kv_bytes[1]

    def checkpoints():
        return [list_checkpoints(folder / kind)[-1][1].stat().st_mtime_ns for kind in KINDS]

    def interrupted(*given):
        raise KeyboardInterrupt

    trained = checkpoints()
    monkeypatch.setattr("writehead.demo.run.text_likelihood", interrupted)
    code, out, err = demo()
    assert (code, "run the same command again" in err) == (130, True)
    assert checkpoints() == trained


def test_the_demo_replaces_no_other_files(tmp_path, demo, bundled):
    (tmp_path / "demo" / "data").mkdir(parents=True)
    (tmp_path / "demo" / "data" / "mine").write_text("mine")
    assert demo()[0] == 2
    assert (tmp_path / "demo" / "data" / "mine").read_text() == "mine"
    assert [path.name for path in (tmp_path / "demo").iterdir()] == ["data"]
