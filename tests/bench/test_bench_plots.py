import json
from pathlib import Path

RESULT = Path(__file__).parents[2] / "results" / "decoding" / "decode-sweeps.json"


def test_a_plot_has_our_times_the_floor_and_the_peer(writehead, tmp_path):
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    for row in result["sweeps"]["batch"]:
        row["measured"]["PyTorch, eager"] = row["measured"]["ours, true lengths"]
    (tmp_path / "decode.json").write_text(json.dumps(result))
    code, _, err = writehead("bench", "plot", tmp_path / "decode.json", tmp_path / "plots")
    assert code == 0, err
    names = ["decode-batch.png", "decode-batch.svg", "decode-context.png", "decode-context.svg"]
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == names
    # matplotlib names each text in a comment before its shapes
    batch, context = ((tmp_path / "plots" / name).read_text() for name in names[1::2])
    for drawn in (context, batch):
        assert "<!-- multi-query, floor -->" in drawn
        assert f"{result['environment']['hardware']['device']}, {result['dtype']}" in drawn
    assert "plain PyTorch" in batch
    assert "plain PyTorch" not in context


def test_sweeps_are_measured_and_drawn(writehead, quick_chip, monkeypatch, tmp_path):
    monkeypatch.setattr("writehead.cli.bench_runs.CONTEXTS", ([], [2, 4]))
    monkeypatch.setattr("writehead.cli.bench_runs.BATCHES", ([], [1, 3]))
    path = tmp_path / "decode.json"
    sizes = ("--batch=2", "--source=3", "--target=2", "--beam=1", "--vocab-size=40", "--repeats=1")
    command = ("--preset=tiny/multi-query", *sizes, "--true-lengths", "--no-peers", "--device=cpu")
    code, _, _ = writehead("bench", "decode", *command, "--plot", tmp_path, "--output", path)
    assert code == 0
    sweeps = json.loads(path.read_text())["sweeps"]
    heads, query = "multi-head", "multi-query"
    contexts = [(row["kind"], row["context"]) for row in sweeps["context"]]
    assert contexts == [(heads, 2), (heads, 4), (query, 2), (query, 4)]
    assert [row["setting"]["batch"] for row in sweeps["batch"]] == [1, 3, 1, 3]
    assert (tmp_path / "decode-batch.png").stat().st_size > 10_000
