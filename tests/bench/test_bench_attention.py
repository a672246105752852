import json

import pytest
import torch

from helpers import random, slow_attend
from writehead.bench import attention
from writehead.bench.attention import Inputs, Shape, _methods
from writehead.errors import BackendError

CPU = torch.device("cpu")
SMALL = ("--shape=3,7,1", "--shape=3,7,4", "--heads=4", "--depth=16", "--repeats=2")


@pytest.fixture
def bench(writehead, quick_chip, monkeypatch, tmp_path):
    """Runs both shapes; `error` is raised instead of measuring shape number `at`."""
    measure, path = attention._measure, tmp_path / "results" / "attention.json"

    def run(*options, error=None, at=0):
        left = [at]

        def measured(*given):
            left[0] -= 1
            if error is not None and left[0] < 0:
                raise error
            return measure(*given)

        monkeypatch.setattr(attention, "_measure", measured)
        command = ("bench", "attention", *SMALL, "--device=cpu", "--output", path, *options)
        return writehead(*command), path

    return run


@pytest.mark.parametrize("g", [1, 2, 4])
def test_every_method_computes_what_a_slow_loop_does(g):
    b, h, m, k = 3, 4, 11, 8
    one = Inputs(random(b, h, 1, k), random(b, g, m, k), random(b, g, m, k))
    expected = slow_attend(one.Q, one.K, one.V, lambda row, i, j: True, k**-0.5)
    methods = _methods(Shape(b, m, g, h, k), CPU)
    del methods["ours"]
    assert ("SDPA, enable_gqa" in methods) == (g < h)
    for method in methods.values():
        torch.testing.assert_close(method(one)(), expected)


def test_a_record_has_every_method_its_error_and_the_floor(bench):
    (code, out, _), path = bench()
    assert code == 0
    assert "GPU" in out  # which our kernels need
    result = json.loads(path.read_text())
    assert result["environment"]["command"].startswith("writehead bench attention --shape=3,7,1")
    assert [row["g"] for row in result["rows"]] == [1, 4]
    for row in result["rows"]:
        size = row["kv_bytes"]
        assert size == 3 * 7 * row["g"] * 2 * 16 * 4
        assert row["floor_us"] == pytest.approx(size / result["chip"]["bandwidth"] * 1e6)
        assert "absent" in row["measured"].pop("ours")
        for method in row["measured"].values():
            assert len(method["us"]["repeats"]) == 2
            assert method["relative_error"] < 1e-5
            assert method["bytes_per_second"] == pytest.approx(size / method["us"]["median"] * 1e6)


def test_an_interrupted_benchmark_keeps_its_rows_and_can_be_repeated(bench):
    (code, out, err), path = bench(error=KeyboardInterrupt())
    assert (code, out, path.exists()) == (130, "", False)
    (code, out, err), path = bench(error=KeyboardInterrupt(), at=1)
    assert (code, out, str(path) in err) == (130, "", True)
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


def test_a_failing_peer_is_reported(bench, monkeypatch):
    def fails(one):
        raise BackendError("this method is broken")

    monkeypatch.setattr(attention, "_methods", lambda shape, device: {"products": fails})
    (code, out, _), _ = bench()
    assert code == 0
    assert "products: this method is broken" in out
