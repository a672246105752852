import json

import pytest
import torch

from helpers import random, slow_attend
from writehead.bench import attention
from writehead.errors import BackendError

SMALL = ("--shape=3,7,1", "--shape=3,7,8", "--repeats=2", "--device=cpu")


@pytest.fixture
def bench(writehead, quick_chip, monkeypatch, tmp_path):
    """Runs both shapes; `error` is raised instead of measuring shape number `at`."""
    measure, path = attention.bench_attention, tmp_path / "results" / "attention.json"

    def run(*options, error=None, at=0):
        def measured(shapes, place):
            for i, row in enumerate(measure(shapes, place)):
                if error is not None and i == at:
                    raise error
                yield row

        monkeypatch.setattr(attention, "bench_attention", measured)
        return writehead("bench", "attention", *SMALL, "--output", path, *options), path

    return run


@pytest.mark.parametrize("g", [1, 2, 8])
def test_every_method_computes_what_a_slow_loop_does(g):
    Q, K, V = random(3, 8, 1, 128), random(3, g, 11, 128), random(3, g, 11, 128)
    expected = slow_attend(Q, K, V, lambda row, i, j: True, 128**-0.5)
    for name, method in attention.METHODS.items():
        if name != "ours":
            torch.testing.assert_close(method(Q, K, V), expected)


def test_a_record_has_every_method_its_error_and_the_floor(bench):
    (code, out, _), path = bench()
    assert code == 0
    assert "GPU" in out  # which our kernels need
    result = json.loads(path.read_text())
    assert result["environment"]["command"].startswith("writehead bench attention --shape=3,7,1")
    assert [row["g"] for row in result["rows"]] == [1, 8]
    for row in result["rows"]:
        size = row["kv_bytes"]
        assert size == 3 * 7 * row["g"] * 2 * 128 * 4
        assert row["floor"]["us"] == pytest.approx(size / result["chip"]["bandwidth"] * 1e6)
        assert "absent" in row["measured"].pop("ours")
        for method in row["measured"].values():
            assert len(method["us"]["repeats"]) == 2
            assert method["relative_error"] < 1e-5


def test_an_interrupted_benchmark_keeps_its_rows_and_can_be_repeated(bench):
    (code, out, err), path = bench(error=KeyboardInterrupt())
    assert (code, out, path.exists()) == (130, "", False)
    (code, out, err), path = bench(error=KeyboardInterrupt(), at=1)
    assert (code, out, "rows so far" in err) == (130, "", True)
    result = json.loads(path.read_text())
    assert ([row["g"] for row in result["rows"]], result["partial"]) == ([1], True)
    # the same command replaces a partial record, and a complete one only if forced
    assert bench()[0][0] == 0
    complete = path.read_text()
    assert "partial" not in json.loads(complete)
    assert bench()[0][0] == 2
    for error, expected in ((KeyboardInterrupt(), 130), (BackendError("no kernel"), 2)):
        (code, _, err), _ = bench("--force", error=error)
        assert (code, path.read_text()) == (expected, complete)  # since nothing was measured
    assert "no kernel" in err
