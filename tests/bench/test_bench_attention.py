import json

import pytest
import torch

from helpers import random, slow_attend
from writehead.bench import attention
from writehead.bench.attention import Inputs, Shape, _ways, default_shapes
from writehead.errors import BackendError

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
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


def test_the_default_shapes_of_a_gpu():
    shapes = default_shapes(CUDA, 8, 128)
    assert len(shapes) == len(set(shapes)) == 16
    assert {shape.attention.kind for shape in shapes} == {"multi-query", "multi-head"}
    # 15.1 and 120.6 microseconds at 4.45 TB/s
    assert [shape.kv_bytes(2) for shape in shapes[:2]] == [67_108_864, 536_870_912]


@pytest.mark.parametrize("g", [1, 2, 4])
def test_every_way_computes_what_a_slow_loop_does(g):
    b, h, m, k = 3, 4, 11, 8
    one = Inputs(random(b, h, 1, k), random(b, g, m, k), random(b, g, m, k))
    expected = slow_attend(one.Q, one.K, one.V, lambda row, i, j: True, k**-0.5)
    ways = _ways(Shape(b, m, g, h, k), CPU)
    assert set(ways) >= {"SDPA, folded", "products"}
    assert ("SDPA, enable_gqa" in ways) == (g < h)
    for way in ways.values():
        torch.testing.assert_close(way(one)(), expected)


def test_a_result_has_every_way_its_error_and_the_floor(bench):
    (code, out, _), path = bench()
    assert code == 0
    assert "GPU" in out  # which our kernels need
    result = json.loads(path.read_text())
    assert result["bench"] == "attention"
    assert result["environment"]["command"].startswith("writehead bench attention --shape=3,7,1")
    assert [shape["g"] for shape in result["shapes"]] == [1, 4]
    for shape in result["shapes"]:
        size = shape["kv_bytes"]
        assert size == 3 * 7 * shape["g"] * 2 * 16 * 4
        assert shape["floor_us"] == pytest.approx(size / result["chip"]["bandwidth"] * 1e6)
        assert shape["bytes_in_turn"] == shape["sets"] * size
        assert "absent" in shape["ways"].pop("ours")
        for way in shape["ways"].values():
            assert len(way["us"]["repeats"]) == 2
            assert way["relative_error"] < 1e-5
            assert way["bytes_per_second"] == pytest.approx(size / way["us"]["median"] * 1e6)
        sdpa = [way["us"]["median"] for name, way in shape["ways"].items() if "SDPA" in name]
        assert shape["best"]["SDPA"]["us"] == min(sdpa)
        assert "FlashInfer" not in shape["best"]


def test_an_interrupted_benchmark_keeps_what_it_measured_and_can_be_repeated(bench):
    (code, out, err), path = bench(error=KeyboardInterrupt())
    assert (code, out, path.exists()) == (130, "", False)
    (code, out, err), path = bench(error=KeyboardInterrupt(), at=1)
    assert (code, out, str(path) in err) == (130, "", True)
    result = json.loads(path.read_text())
    assert ([shape["g"] for shape in result["shapes"]], result["partial"]) == ([1], True)
    # the same command replaces a partial result, and a whole one if forced
    assert bench()[0][0] == 0
    whole = path.read_text()
    assert "partial" not in json.loads(whole)
    assert bench()[0][0] == 2
    for error, expected in ((KeyboardInterrupt(), 130), (BackendError("no kernel"), 2)):
        (code, _, err), _ = bench("--force", error=error)
        assert (code, path.read_text()) == (expected, whole)  # since nothing was measured
    assert "no kernel" in err
    assert bench("--force", error=KeyboardInterrupt(), at=1)[0][0] == 130
    assert json.loads(path.read_text())["partial"] is True


def test_a_failing_peer_is_reported_and_a_failure_of_ours_is_an_error(bench, monkeypatch):
    def fails(one):
        raise BackendError("this way is broken")

    ways = {"products": fails}
    monkeypatch.setattr(attention, "_ways", lambda shape, device: ways)
    (code, out, _), _ = bench()
    assert code == 0
    assert "products: this way is broken" in out
    ways["ours"] = fails
    (code, out, err), _ = bench("--force")
    assert (code, out) == (2, "")
    assert "this way is broken" in err
