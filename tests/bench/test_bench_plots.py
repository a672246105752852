import json

import pytest

TIMES = {"median": 2.0, "spread": [1.0, 3.0], "repeats": [1.0, 2.0, 3.0]}


def made_up_result() -> dict[str, object]:
    """As `bench decode --plot` writes it, with what a plot reads of it."""
    contexts = [
        {
            "preset": f"tiny-lm/{kind}",
            "kind": kind,
            "model": {"task": "language"},
            "batch": 16,
            "context": context,
            "floor": {"step_ms": 1.0},
            "measured": {"ours": {"step_ms": TIMES}, "PyTorch, sdpa": {"absent": "no"}},
        }
        for kind in ("multi-head", "multi-query")
        for context in (128, 512)
    ]
    batches = [
        {
            "preset": f"tiny/{kind}",
            "kind": kind,
            "model": {"task": "translation"},
            "setting": {"batch": batch, "source": 5, "target": 6},
            "floor": {"step_ms": {"padded": 1.0, "true": 0.5}},
            "measured": {
                "ours, true lengths": {"step_ms": TIMES},
                "PyTorch, eager": {"step_ms": TIMES},
            },
        }
        for kind in ("multi-head", "multi-query")
        for batch in (1, 2, 4)
    ]
    return {
        "dtype": "float32",
        "environment": {
            "hardware": {"device": "a chip"},
            "versions": {"torch": "2.0"},
            "date": "2026-01-02T03:04:05",
        },
        "sweeps": {"context": contexts, "batch": batches},
    }


def test_what_was_swept_is_drawn_with_its_floor_and_peer(writehead, tmp_path):
    (tmp_path / "decode.json").write_text(json.dumps(made_up_result()))
    code, _, err = writehead("bench", "plot", tmp_path / "decode.json", tmp_path / "plots")
    assert code == 0
    files = sorted(path.name for path in (tmp_path / "plots").iterdir())
    stems = ("decode-batch", "decode-context")
    assert files == [f"{stem}.{kind}" for stem in stems for kind in ("png", "svg")]
    assert err.count("drawn: ") == 4
    # matplotlib names each text in a comment before its shapes
    context, batch = (
        (tmp_path / "plots" / f"decode-{name}.svg").read_text() for name in ("context", "batch")
    )
    for drawn in (context, batch):
        assert "<!-- multi-query, floor -->" in drawn
        assert "a chip, float32" in drawn
    assert "plain PyTorch in a graph" in batch
    assert "plain PyTorch in a graph" not in context  # it could not be measured there


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
        (kind, context) for kind in ("multi-head", "multi-query") for context in (4, 8)
    ]
    assert [row["setting"]["batch"] for row in sweeps["batch"]] == [1, 3, 1, 3]
    assert (tmp_path / "decode-batch.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read"),
        ("{", "is not JSON"),
        ("[]", "has no sweeps to draw"),
        ('{"sweeps": {}}', "has no sweeps to draw"),
        ('{"sweeps": [1]}', "has no sweeps to draw"),
        ('{"sweeps": {"context": [{}]}}', "this result lacks dtype"),
        ("[" * 100_000, "nested"),
    ],
)
def test_what_cannot_be_drawn_is_said(writehead, tmp_path, text, words):
    path = tmp_path / "result.json"
    if text is not None:
        path.write_text(text)
    code, out, err = writehead("bench", "plot", path, tmp_path)
    assert (code, out) == (2, "")
    assert words in err
