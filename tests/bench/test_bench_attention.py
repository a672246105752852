import json
import math
from types import SimpleNamespace

import pytest
import torch

from helpers import random, slow_attend
from writehead.bench import attention, peers
from writehead.bench.attention import Inputs, Shape, _ways, default_shapes
from writehead.bench.peers import flashinfer_call, tried
from writehead.bench.timing import count_sets
from writehead.errors import BackendError

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
SMALL = ("--shape=3,7,1", "--shape=3,7,4", "--heads=4", "--depth=16", "--repeats=2")


def test_on_a_gpu_the_shapes_are_eight_sizes_by_both_kinds():
    shapes = default_shapes(CUDA, 8, 128)
    assert len(shapes) == len(set(shapes)) == 16
    assert {shape.attention.kind for shape in shapes} == {"multi-query", "multi-head"}
    # what 15.1 and 120.6 microseconds at 4.45 TB/s read
    assert [shape.kv_bytes(2) for shape in shapes[:2]] == [67_108_864, 536_870_912]


def test_all_sets_together_are_larger_than_the_cache():
    size = Shape(1, 8192, 1).kv_bytes(4)
    assert (count_sets(size, CPU) - 1) * size < 64 << 20 <= count_sets(size, CPU) * size
    assert count_sets(1 << 40, CPU) == 2
    assert count_sets(1, CPU) == 256


@pytest.mark.parametrize("g", [1, 2, 4])
def test_every_way_gives_what_a_slow_loop_gives(g):
    b, h, m, k = 3, 4, 11, 8
    one = Inputs(random(b, h, 1, k), random(b, g, m, k), random(b, g, m, k))
    expected = slow_attend(one.Q, one.K, one.V, lambda row, i, j: True, k**-0.5)
    ways = _ways(Shape(b, m, g, h, k), CPU)
    assert set(ways) >= {"SDPA, folded", "products"}
    assert ("SDPA, enable_gqa" in ways) == (g < h)
    for way in ways.values():
        torch.testing.assert_close(way(one)(), expected)


def test_an_interrupted_run_keeps_the_shapes_it_has(writehead, monkeypatch, quick_chip, tmp_path):
    measure = attention._measure

    def stop(shape: Shape, *given: object) -> object:
        if shape.g == 4:
            raise KeyboardInterrupt
        return measure(shape, *given)

    monkeypatch.setattr(attention, "_measure", stop)
    path = tmp_path / "attention.json"
    code, out, err = writehead("bench", "attention", *SMALL, "--device=cpu", "--output", path)
    assert (code, out) == (130, "")
    assert f"interrupted; {path} has what there is so far, marked as partial" in err
    result = json.loads(path.read_text())
    assert [shape["g"] for shape in result["shapes"]] == [1]
    assert result["partial"] is True


def test_a_result_has_every_way_its_error_and_the_floor(writehead, quick_chip, tmp_path):
    path = tmp_path / "results" / "attention.json"
    code, out, _ = writehead("bench", "attention", *SMALL, "--device=cpu", "--output", path)
    assert code == 0
    assert "our kernels need a GPU" in out
    result = json.loads(path.read_text())
    assert result["bench"] == "attention"
    assert result["environment"]["command"].startswith("writehead bench attention --shape=3,7,1")
    assert [shape["g"] for shape in result["shapes"]] == [1, 4]
    for shape in result["shapes"]:
        assert shape["kv_bytes"] == 3 * 7 * shape["g"] * 2 * 16 * 4
        assert shape["floor_us"] == pytest.approx(
            shape["kv_bytes"] / result["chip"]["bandwidth"] * 1e6
        )
        assert shape["bytes_in_turn"] == shape["sets"] * shape["kv_bytes"]
        assert "absent" in shape["ways"].pop("ours")
        for way in shape["ways"].values():
            assert len(way["us"]["repeats"]) == 2
            assert way["relative_error"] < 1e-5
            rate = shape["kv_bytes"] / (way["us"]["median"] * 1e-6)
            assert way["bytes_per_second"] == pytest.approx(rate)
        sdpa = [way["us"]["median"] for name, way in shape["ways"].items() if "SDPA" in name]
        assert shape["best"]["SDPA"]["us"] == min(sdpa)
        assert "FlashInfer" not in shape["best"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--shape=3,7"], "is not b,m,g"),
        (["--heads=0"], "--heads 0 is too little"),
        (["--depth=-1"], "--depth -1 is too little"),
        (["--shape=3,7,x"], "is not b,m,g"),
        (["--shape=0,7,1"], "both must be at least 1"),
        (["--shape=3,7,3"], "choose g from 1, 2, 4, 8"),
        (["--repeats=0"], "0 repeats cannot be timed"),
        (["--dtype=float31"], "there is no dtype"),
        (["--device=gpu"], "there is no device"),
        (["--output=/dev/null/x.json"], "/dev/null is no folder, and one is wanted"),
        (["--output=/dev/full"], "/dev/full is a pipe or a device, which nothing replaces"),
        (["--output=/"], "could not be written: Is a directory"),
    ],
)
def test_wrong_input_is_one_sentence_before_anything_is_measured(
    writehead, no_chip, arguments, words
):
    given = [*arguments, *(["--shape=1,2,1"] if "--shape" not in arguments[0] else [])]
    code, out, err = writehead("bench", "attention", "--device=cpu", *given)
    assert (code, out) == (2, "")
    assert words in err.splitlines()[-1]


@pytest.mark.parametrize(
    "verb",
    [
        ("attention", "--shape=1,2,1"),
        ("decode",),
        ("translate", "nowhere", "--input=nothing"),
        ("tokens", "nowhere", "--input=nothing"),
    ],
    ids=lambda verb: verb[0],
)
def test_a_result_that_is_there_is_kept_unless_told_to_replace_it(
    writehead, no_chip, tmp_path, verb
):
    path = tmp_path / "result.json"
    path.write_text("mine")
    command = ("bench", *verb, "--device=cpu", "--output", path)
    assert writehead(*command) == (
        2,
        "",
        f"error: {path} exists; choose another place, or pass --force to replace it\n",
    )
    assert path.read_text() == "mine"


def test_a_result_is_replaced_when_told_to(writehead, quick_chip, tmp_path):
    path = tmp_path / "result.json"
    path.write_text("mine")
    command = ("bench", "attention", *SMALL, "--device=cpu", "--output", path)
    assert writehead(*command, "--force")[0] == 0
    assert json.loads(path.read_text())["bench"] == "attention"


def test_what_fails_leaves_a_sentence():
    def fails() -> dict[str, object]:
        raise RuntimeError("no kernel found\nand a long story")

    assert tried(fails) == {"absent": "RuntimeError: no kernel found"}
    assert tried(lambda: {"us": math.pi}) == {"us": math.pi}


def test_where_ours_fails_the_benchmark_does(writehead, quick_chip, monkeypatch):
    def fails(one: Inputs) -> object:
        raise BackendError("this way is broken")

    ways = {"products": fails}
    monkeypatch.setattr(attention, "_ways", lambda shape, device: ways)
    code, out, _ = writehead("bench", "attention", *SMALL, "--device=cpu")
    assert code == 0
    assert "products: this way is broken" in out
    ways["ours"] = fails
    code, out, err = writehead("bench", "attention", *SMALL, "--device=cpu")
    assert (code, out) == (2, "")
    assert "this way is broken" in err


@pytest.mark.parametrize("g", [1, 2])
def test_flashinfers_calls_share_one_workspace_and_read_pages_of_the_same_numbers(monkeypatch, g):
    spaces = []

    class Wrapper:
        def __init__(self, workspace, layout, use_tensor_cores):
            assert layout == "HND"
            spaces.append(workspace)

        def plan(self, starts, pages, last, h, g, k, page, **options):
            self.starts, self.pages, self.last, self.options = starts, pages, last, options

        def run(self, Q, paged):
            rows = []
            for i, q in enumerate(Q):
                mine = self.pages[self.starts[i] : self.starts[i + 1]]
                K, V = (torch.cat(list(T[mine]), dim=1).unsqueeze(0) for T in paged)
                q, scale = q[None, :, None], self.options["sm_scale"]
                rows.append(slow_attend(q, K, V, lambda row, i, j: True, scale))
            return torch.cat(rows)

    library = SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=Wrapper)
    monkeypatch.setattr("importlib.import_module", lambda name: library)
    monkeypatch.setattr(peers, "WORKSPACE", 16)
    monkeypatch.setattr(peers, "PAGE", 4)
    b, h, m, k = 3, 4, 12, 8
    ways = _ways(Shape(b, m, g, h, k), CUDA)  # nothing is done before a way is taken
    for name in ("FlashInfer, tensor cores", "FlashInfer, plain cores"):
        for _ in range(2):
            one = Inputs(random(b, h, 1, k), random(b, g, m, k), random(b, g, m, k))
            expected = slow_attend(one.Q, one.K, one.V, lambda row, i, j: True, one.scale)
            torch.testing.assert_close(ways[name](one)(), expected)
    assert len(spaces) == 4
    assert all(space is spaces[0] for space in spaces)


def test_flashinfer_that_is_not_there_says_so(monkeypatch):
    def missing(name: str) -> object:
        raise ImportError(name)

    monkeypatch.setattr("importlib.import_module", missing)
    Q, K, V = random(1, 2, 1, 4), random(1, 1, 3, 4), random(1, 1, 3, 4)
    with pytest.raises(BackendError, match="flashinfer is not installed"):
        flashinfer_call(Q, K, V, 0.5, torch.zeros(1), tensor_cores=True)
