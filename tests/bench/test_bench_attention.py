import json

import pytest
import torch

from helpers import random, slow_attend
from writehead.bench import attention
from writehead.errors import BackendError

SMALL = ("--shape=3,7,1", "--shape=3,7,8", "--repeats=2", "--device=cpu")


@pytest.mark.parametrize("g", [1, 2, 8])
def test_every_method_computes_what_a_slow_loop_does(g):
    Q, K, V = random(3, 8, 1, 128), random(3, g, 11, 128), random(3, g, 11, 128)
    expected = slow_attend(Q, K, V, lambda row, i, j: True, 128**-0.5)
    for name, method in attention.METHODS.items():
        if name != "ours":
            torch.testing.assert_close(method(Q, K, V), expected)


def test_a_record_has_every_method_its_error_and_the_floor(bench):
    result = bench("attention", *SMALL)
    assert [row["g"] for row in result["rows"]] == [1, 8]
    for row in result["rows"]:
        size = row["kv_bytes"]
        assert size == 3 * 7 * row["g"] * 2 * 128 * 4
        assert row["floor"]["us"] == pytest.approx(size / result["chip"]["bandwidth"] * 1e6)
        assert "GPU" in row["measured"].pop("ours")["absent"]
        for method in row["measured"].values():
            assert len(method["us"]["repeats"]) == 2
            assert method["relative_error"] < 1e-5


def test_an_interrupted_benchmark_keeps_its_rows(writehead, quick_chip, monkeypatch, tmp_path):
    measure, path = attention.bench_attention, tmp_path / "results" / "attention.json"

    def run(*options, error=None, at=0):
        """Raises an error instead of measuring shape number `at`."""

        def measured(shapes, place):
            for i, row in enumerate(measure(shapes, place)):
                if error is not None and i == at:
                    raise error
                yield row

        monkeypatch.setattr(attention, "bench_attention", measured)
        return writehead("bench", "attention", *SMALL, "--output", path, *options)

    assert (*run(error=KeyboardInterrupt())[:2], path.exists()) == (130, "", False)
    code, out, err = run(error=KeyboardInterrupt(), at=1)
    assert (code, out, "rows so far" in err) == (130, "", True)
    result = json.loads(path.read_text())
    assert ([row["g"] for row in result["rows"]], result["partial"]) == ([1], True)
    # the same command replaces a partial record, and a complete one only if forced
    assert run()[0] == 0
    complete = path.read_text()
    assert "partial" not in json.loads(complete)
    assert run()[0] == 2
    for error, expected in ((KeyboardInterrupt(), 130), (BackendError("no kernel"), 2)):
        code, _, err = run("--force", error=error)
        assert (code, path.read_text()) == (expected, complete)  # since nothing was measured
    assert "no kernel" in err


@pytest.mark.gpu
def test_attention_is_measured_by_every_method_on_a_gpu(bench):
    shapes = ("--shape=64,512,1", "--shape=64,512,8", "--shape=1,4096,1")
    for row in bench("attention", *shapes)["rows"]:
        assert "us" in row["measured"]["ours"]
        for name, method in row["measured"].items():
            assert "absent" in method or method["relative_error"] < 0.02, name
