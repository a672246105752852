import json

TIMES = {"step_ms": {"median": 2.0, "spread": [1.0, 3.0], "repeats": [1.0, 2.0, 3.0]}}
KINDS = ("multi-head", "multi-query")


def test_a_plot_has_our_times_the_floor_and_the_peer(writehead, tmp_path):
    contexts = [
        {
            "preset": f"tiny-lm/{kind}",
            "kind": kind,
            "model": {"task": "language"},
            "batch": 16,
            "context": context,
            "floor": {"step_ms": 1.0},
            "measured": {"ours": TIMES, "PyTorch, sdpa": {"absent": "no"}},
        }
        for kind in KINDS
        for context in (128, 512)
    ]
    batches = [
        {
            "preset": f"tiny/{kind}",
            "kind": kind,
            "model": {"task": "translation"},
            "setting": {"batch": batch, "source": 5, "target": 6},
            "floor": {"step_ms": {"padded": 1.0, "true": 0.5}},
            "measured": {"ours, true lengths": TIMES, "PyTorch, eager": TIMES},
        }
        for kind in KINDS
        for batch in (1, 2, 4)
    ]
    environment = {"hardware": {"device": "a chip"}, "versions": {"torch": "2.0"}}
    result = {
        "dtype": "float32",
        "environment": {**environment, "date": "2026-01-02T03:04:05"},
        "sweeps": {"context": contexts, "batch": batches},
    }
    (tmp_path / "decode.json").write_text(json.dumps(result))
    code, _, err = writehead("bench", "plot", tmp_path / "decode.json", tmp_path / "plots")
    assert code == 0, err
    names = ("decode-batch.png", "decode-batch.svg", "decode-context.png", "decode-context.svg")
    assert tuple(sorted(path.name for path in (tmp_path / "plots").iterdir())) == names
    # matplotlib names each text in a comment before its shapes
    batch, context = ((tmp_path / "plots" / name).read_text() for name in names[1::2])
    for drawn in (context, batch):
        assert "<!-- multi-query, floor -->" in drawn
        assert "a chip, float32" in drawn
    assert "plain PyTorch" in batch
    assert "plain PyTorch" not in context  # where it is absent


def test_sweeps_are_measured_and_drawn(writehead, quick_chip, monkeypatch, tmp_path):
    monkeypatch.setattr("writehead.cli.bench_runs.CONTEXTS", ([], [4, 8]))
    monkeypatch.setattr("writehead.cli.bench_runs.BATCHES", ([], [1, 3]))
    path = tmp_path / "decode.json"
    sizes = ("--batch=2", "--source=3", "--target=4", "--beam=1", "--vocabulary=40", "--repeats=1")
    command = ("--preset=tiny/multi-query", *sizes, "--true-lengths", "--no-peers", "--device=cpu")
    code, _, _ = writehead("bench", "decode", *command, "--plot", tmp_path, "--output", path)
    assert code == 0
    sweeps = json.loads(path.read_text())["sweeps"]
    assert [(row["kind"], row["context"]) for row in sweeps["context"]] == [
        (kind, context) for kind in KINDS for context in (4, 8)
    ]
    assert [row["setting"]["batch"] for row in sweeps["batch"]] == [1, 3, 1, 3]
    assert (tmp_path / "decode-batch.png").stat().st_size > 10_000
