import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from helpers import config, model
from writehead import cost
from writehead.bench import peers, timing
from writehead.bench.decode import Place, translation_row
from writehead.cli.bench_runs import paper_row
from writehead.cli.bench_tables import show_decode
from writehead.cost import Setting
from writehead.decoding import beam_search
from writehead.errors import BackendError

CPU = torch.device("cpu")
SMALL = ("--device=cpu", "--vocab-size=50", "--batch=3", "--repeats=2", "--no-peers")
TINY = (*SMALL, "--source=5", "--target=6")


@pytest.fixture
def bench(writehead, quick_chip, tmp_path):
    def run(*options):
        path = tmp_path / "decode.json"
        code, out, err = writehead("bench", "decode", *options, "--output", path)
        return code, out, err, json.loads(path.read_text()) if path.exists() else None

    return run


def test_a_result_says_what_was_measured_and_adds_up(bench, capsys):
    code, out, err, result = bench("--preset=tiny", "--rows=multi-head,multi-query", *TINY)
    assert code == 0
    assert "tiny/multi-query, batch 3, beam 4: ours, true lengths" in err
    assert "TPUv2" not in out
    assert "partial" not in result
    assert result["environment"]["command"].startswith("writehead bench decode --preset=tiny")
    assert result["chip"]["bandwidth"] > 0
    assert result["setting"]["beams"] == [1, 4]
    assert len(result["rows"]) == 4
    for row in result["rows"]:
        assert row["model"]["vocab_size"] == 50
        assert row["paper"] is None
        assert set(row["measured"]) == {"ours, padded", "ours, true lengths"}
        for kind, found in zip(("padded", "true"), row["measured"].values(), strict=True):
            step, encoder = found["step_ms"]["median"], found["encoder_ms"]["median"]
            assert len(found["step_ms"]["repeats"]) == len(found["encoder_ms"]["repeats"]) == 2
            assert found["us_per_token"]["decoder"] == pytest.approx(step * 1e3 / 3)
            assert found["us_per_token"]["encoder"] == pytest.approx(encoder * 1e3 / (3 * 5))
            assert found["floor_step_ms"] == row["floor"]["step_ms"][kind]
            assert found["share_of_floor"] == pytest.approx(found["floor_step_ms"] / step)

    for row in result["rows"]:  # the table of the paper's setting has the paper's figures
        row["paper"] = paper_row(row["preset"].replace("tiny", "wmt14"), Setting(1024, 128, 128))
    show_decode(result, Console(width=120))
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert any("TPUv2" in line for line in lines)
    for name, figures in (
        ("tiny/multi-head", ("1.7 + 46", "2 + 203")),
        ("tiny/multi-query", ("1.5 + 3.8", "1.6 + 32")),
        ("gain of multi-query", ("12.1×", "6.3×")),
    ):
        line = next(line for line in lines if line.startswith(name))
        assert all(figure in line for figure in figures)
    query, setting = "multi-query-local", Setting(1024, 128, 128, beam=4)
    assert paper_row(f"wmt14/{query}", setting)["decoder"] == 3.3
    for name in (f"wmt14-small/{query}", "wmt14/multi-head-1x128"):
        assert paper_row(name, setting) is None


@pytest.mark.parametrize("cache", [16 << 20, 4_000], ids=["cached", "memory"])
def test_a_language_model_is_timed_after_its_contexts(bench, monkeypatch, cache):
    monkeypatch.setattr(timing, "CACHE_BYTES", cache)
    models = ("--preset=tiny-lm", "--rows=multi-head,multi-query")
    code, out, _, result = bench(*models, "--context=6", "--context=10", *SMALL)
    assert code == 0
    assert "gain of multi-query" in out
    assert result["rows"] == []
    assert [row["context"] for row in result["contexts"]] == [6, 6, 10, 10]
    heads, query = result["contexts"][2:]
    assert heads["floor"]["attention_us"] == pytest.approx(8 * query["floor"]["attention_us"])
    assert heads["kv_bytes"] == 2 * 3 * 10 * 8 * 32 * 4  # layers, rows, positions, heads, k + v
    for row in result["contexts"]:
        found, alone = row["measured"]["ours"], row["attention"]
        assert found["us_per_token"] == pytest.approx(found["step_ms"]["median"] * 1e3 / 3)
        assert alone["kv_bytes"] * 2 == row["kv_bytes"]
        assert alone["bytes_in_turn"] == alone["sets"] * alone["kv_bytes"]
        # the memory's rate shows only where more is read than the cache holds
        assert (alone["bytes_in_turn"] >= 4 * cache) == (cache == 4_000)
        assert ("bytes_per_second" in alone) == ("share_of_floor" in alone) == (cache == 4_000)
        if cache == 4_000:
            rate = alone["kv_bytes"] / alone["us"]["median"] * 1e6
            assert alone["bytes_per_second"] == pytest.approx(rate)
            assert alone["share_of_floor"] == pytest.approx(rate / result["chip"]["bandwidth"])


@pytest.mark.parametrize(
    ("error", "expected"), [(KeyboardInterrupt(), 130), (BackendError("no kernel"), 2)]
)
def test_rows_measured_before_a_failure_of_ours_are_kept(bench, monkeypatch, error, expected):
    def fails(*given):
        raise error

    monkeypatch.setattr("writehead.bench.context.stepped_greedy", fails)
    models = ("--preset=tiny", "--preset=tiny-lm", "--rows=multi-query", "--context=24")
    code, out, _, result = bench(*models, *TINY, "--beam=1", "--padded")
    assert (code, out, result["partial"]) == (expected, "", True)
    [row] = result["rows"]
    assert (row["preset"], list(row["measured"])) == ("tiny/multi-query", ["ours, padded"])


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(("beam", "reorders"), [(1, False), (3, True), (3, False)])
def test_plain_pytorch_in_a_graph_decodes_what_plain_steps_do(monkeypatch, beam, reorders, window):
    def capture(work, device):
        for _ in range(peers.WARM_CALLS + 1):  # the last one stands for the capture
            work()
        return SimpleNamespace(replay=work)

    monkeypatch.setattr(peers, "capture", capture)
    made = model(config("translation", window=window, tied=False))
    setting = Setting(batch=4, source=7, target=9, beam=beam)
    torch.manual_seed(1)
    decode = peers.graph_decode(made, setting, reorders=reorders)
    torch.manual_seed(1)
    source = peers.random_source(made, setting)
    state = made.start(source, setting.target, beam=beam if reorders else 1)
    if reorders:
        found = beam_search(made.step, state, peers.search_config(setting), eos=1)
        expected = [one.tokens for [one] in found]
    else:  # every beam is a greedy search of its own
        fed = state.first
        for _ in range(setting.target):
            fed = made.step(fed, state).argmax(dim=1)
        expected = fed.repeat_interleave(beam).tolist()
    for _ in range(2):  # a decoding leaves nothing behind for the next
        found = decode.run()
        assert ([one.tokens for [one] in found] if reorders else found.tolist()) == expected


def test_hugging_face_is_timed_with_our_sizes_against_the_floor_of_true_lengths():
    pytest.importorskip("transformers")
    chip = cost.Chip("slow", 1e9, 1.0, 1e30, "made up")
    place = Place(chip, CPU, torch.float32, 2, True, lambda text: None)
    sizes = config("translation", d=12, h=6, g=6, k=2, v=2)
    row = translation_row("x", sizes, Setting(2, 7, 5, beam=3), place)
    found = row["measured"]["Hugging Face"]
    assert len(found["step_ms"]["repeats"]) == 2
    assert found["floor_step_ms"] == row["floor"]["step_ms"]["true"]
    assert row["floor"]["step_ms"]["true"] < row["floor"]["step_ms"]["padded"]
    for changes, words in (
        ({"g": 1}, "multi-query"),
        ({"window": 3}, "local"),
        ({"d": 14}, "h k = d"),
    ):
        other = dataclasses.replace(sizes, **changes)
        row = translation_row("x", other, Setting(2, 3, 4), place, lengths=("true",))
        assert words in row["measured"]["Hugging Face"]["absent"]
