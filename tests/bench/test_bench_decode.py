import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch

from helpers import config, model
from writehead import cost
from writehead.bench import decode, peers, timing
from writehead.bench.decode import Place, plain_decode, translation_row
from writehead.cost import Setting
from writehead.decoding import beam_search
from writehead.errors import BackendError

CPU = torch.device("cpu")
SMALL = ("--device=cpu", "--vocab-size=50", "--batch=3", "--repeats=2")
TINY = (*SMALL, "--source=5", "--target=6")
ROWS = "--rows=multi-head,multi-query"


@pytest.fixture
def bench(writehead, quick_chip, tmp_path):
    def run(verb, *options):
        path = tmp_path / "record.json"
        code, out, err = writehead("bench", verb, *options, "--output", path)
        return code, out, err, json.loads(path.read_text()) if path.exists() else None

    return run


def test_a_record_says_what_was_measured_and_adds_up(bench):
    code, _, err, result = bench("decode", "--preset=tiny", ROWS, *TINY, "--no-peers")
    assert code == 0
    assert "tiny/multi-query, batch 3, beam 4: ours, true lengths" in err
    assert "partial" not in result
    assert result["environment"]["command"].startswith("writehead bench decode --preset=tiny")
    assert result["chip"]["bandwidth"] > 0
    assert result["config"]["beams"] == [1, 4]
    assert len(result["rows"]) == 4
    for row in result["rows"]:
        assert row["model"]["vocab_size"] == 50
        assert set(row["measured"]) == {"ours, padded", "ours, true lengths"}
        for kind, found in zip(("padded", "true"), row["measured"].values(), strict=True):
            step, encoder = found["step_ms"]["median"], found["encoder_ms"]["median"]
            assert len(found["step_ms"]["repeats"]) == len(found["encoder_ms"]["repeats"]) == 2
            assert found["us_per_token"]["decoder"] == pytest.approx(step * 1e3 / 3)
            assert found["us_per_token"]["encoder"] == pytest.approx(encoder * 1e3 / (3 * 5))
            assert found["floor_step_ms"] == row["floor"]["step_ms"][kind]
            assert found["share_of_floor"] == pytest.approx(found["floor_step_ms"] / step)


def test_a_language_model_is_timed_after_its_contexts(bench):
    contexts = ("--context=6", "--context=10")
    code, _, _, result = bench("context", "--preset=tiny-lm", ROWS, *contexts, *SMALL)
    assert code == 0
    assert [row["context"] for row in result["rows"]] == [6, 6, 10, 10]
    heads, query = result["rows"][2:]
    assert heads["kv_bytes"] == 2 * 3 * 10 * 8 * 32 * 4  # layers, rows, positions, heads, k + v
    assert query["kv_bytes"] * 8 == heads["kv_bytes"]
    for row in result["rows"]:
        measured = row["measured"]["ours"]
        assert measured["us_per_token"] == pytest.approx(measured["step_ms"]["median"] * 1e3 / 3)


@pytest.mark.parametrize(
    ("error", "expected"), [(KeyboardInterrupt(), 130), (BackendError("no kernel"), 2)]
)
def test_rows_measured_before_a_failure_of_ours_are_kept(bench, monkeypatch, error, expected):
    calls = []

    def fails_later(*given, **options):
        calls.append(given)
        if len(calls) > 1:
            raise error
        return plain_decode(*given, **options)

    monkeypatch.setattr(decode, "plain_decode", fails_later)
    code, out, _, result = bench("decode", "--preset=tiny", ROWS, *TINY, "--no-peers", "--padded")
    assert (code, out, result["partial"]) == (expected, "", True)
    [row] = result["rows"]
    assert (row["preset"], list(row["measured"])) == ("tiny/multi-head", ["ours, padded"])


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("beam", [1, 3])
def test_plain_pytorch_in_a_graph_decodes_what_plain_steps_do(monkeypatch, beam, window):
    def capture(work, device):
        for _ in range(timing.WARMUP_CALLS + 1):  # the last one stands for the capture
            work()
        return SimpleNamespace(replay=work)

    monkeypatch.setattr(peers, "capture", capture)
    made = model(config("translation", window=window, tied=False))
    setting = Setting(batch=4, source=7, target=9, beam=beam)
    torch.manual_seed(1)
    decoded = peers.graph_decode(made, setting)
    torch.manual_seed(1)
    source = peers.random_source(made, setting)
    state = made.start(source, setting.target, beam=beam)
    found = beam_search(made.step, state, peers.search_config(setting), eos=1)
    expected = [best.tokens for [best] in found]
    for _ in range(2):  # a decoding does not depend on the one before
        found = decoded.run()
        if beam == 1:
            assert found.tolist() == [tokens[-1] for tokens in expected]
        else:
            assert [best.tokens for [best] in found] == expected


def test_libraries_are_timed_with_our_sizes_against_the_floor_of_true_lengths():
    pytest.importorskip("transformers")
    pytest.importorskip("ctranslate2")
    chip = cost.Chip("slow", 1e9, 1.0, 1e30, "made up")
    names = ("ctranslate2", "ctranslate2-flash", "hugging-face", "torch-compile")
    place = Place(chip, CPU, torch.float32, 2, names, lambda text: None)
    sizes = config("translation", d=12, h=6, g=6, k=2, v=2)
    row = translation_row("x", sizes, Setting(2, 7, 5, beam=3), place)
    for label in ("CTranslate2", "Hugging Face"):
        found = row["measured"][label]
        whole, first = found["call_ms"]["median"], found["one_token_call_ms"]["median"]
        assert len(found["step_ms"]["repeats"]) == 2
        assert found["step_ms"]["median"] == pytest.approx((whole - first) / 4)
        assert found["floor_step_ms"] == row["floor"]["step_ms"]["true"]
    for label in ("CTranslate2, flash attention", "torch.compile"):
        assert "GPU" in row["measured"][label]["absent"]
    for changes, words in (
        ({"g": 1}, {"Hugging Face": "multi-query"}),
        ({"window": 3}, {"Hugging Face": "local", "CTranslate2": "window"}),
        ({"d": 14}, {"Hugging Face": "h k = d"}),
    ):
        other = dataclasses.replace(sizes, **changes)
        row = translation_row("x", other, Setting(2, 3, 4), place, lengths=("true",))
        for label in ("Hugging Face", "CTranslate2"):
            measured = row["measured"][label]
            assert words.get(label, "") in measured.get("absent", "")
            assert ("step_ms" in measured) == (label not in words)
