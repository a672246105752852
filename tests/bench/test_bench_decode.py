import dataclasses
import json
import sys

import pytest
import torch
from rich.console import Console

from helpers import config, model
from writehead import cost
from writehead.bench import decode, peers, timing
from writehead.bench.context import Context
from writehead.bench.decode import Place, quickest, translation_row
from writehead.cli import main
from writehead.cli.bench_runs import DecodePlan, paper_row
from writehead.cli.bench_tables import show_decode
from writehead.cost import Setting
from writehead.decoding import beam_search
from writehead.errors import BackendError, ConfigError
from writehead.paper.presets import FAMILIES

SMALL = ("--device=cpu", "--vocabulary=50", "--batch=3", "--repeats=2", "--no-peers")
TINY = (*SMALL, "--source=5", "--target=6")
BOTH = ("--preset=tiny", "--rows=multi-head,multi-query")
LANGUAGE = ("--preset=tiny-lm", "--rows=multi-head,multi-query", "--context=24", "--context=40")


@pytest.fixture
def one_after_another(monkeypatch):
    """Graphs that do their work again each time, which is what a captured one does."""

    class Graph:
        def __init__(self, work, device):
            self.replay = work
            for _ in range(peers.WARM_CALLS + 1):  # on a GPU the last of them only counts
                work()

    monkeypatch.setattr(peers, "capture", Graph)


def test_a_result_says_what_was_measured_and_adds_up(writehead, quick_chip, tmp_path):
    path = tmp_path / "decode.json"
    code, _, err = writehead("bench", "decode", *BOTH, *TINY, "--output", path)
    assert code == 0
    assert "tiny/multi-query, batch 3, beam 4: ours, true lengths" in err
    result = json.loads(path.read_text())
    assert "partial" not in result
    assert result["environment"]["command"].startswith("writehead bench decode --preset=tiny")
    assert result["chip"]["bandwidth"] > 0
    assert result["setting"]["beams"] == [1, 4]
    assert len(result["rows"]) == 4
    for row in result["rows"]:
        batch = row["setting"]["batch"]
        assert row["model"]["vocabulary"] == 50
        assert set(row["measured"]) == {"ours, padded", "ours, true lengths"}
        for kind, found in zip(("padded", "true"), row["measured"].values(), strict=True):
            step = found["step_ms"]["median"]
            assert len(found["step_ms"]["repeats"]) == len(found["encoder_ms"]["repeats"]) == 2
            assert found["us_per_token"]["decoder"] == pytest.approx(step * 1e3 / batch)
            assert found["us_per_token"]["encoder"] == pytest.approx(
                found["encoder_ms"]["median"] * 1e3 / (batch * 5)
            )
            assert found["floor_step_ms"] == row["floor"]["step_ms"][kind]
            assert found["share_of_floor"] == pytest.approx(found["floor_step_ms"] / step)


@pytest.mark.parametrize(("seconds", "turns"), [(0.1, 3), (1.0, 1)])
def test_an_encoder_is_timed_behind_a_decoding_and_behind_another(monkeypatch, seconds, turns):
    calls = []

    def clocked(work, device):
        work()
        calls[-1] = calls[-1].upper()
        return seconds

    for module in (decode, timing):
        monkeypatch.setattr(module, "clocked", clocked)
    parts = peers.Decode(lambda: calls.append("e"), lambda: calls.append("d"), 2, "")
    chip = cost.Chip("chip", 1e9, 1e9, 1e9, "")
    place = Place(chip, torch.device("cpu"), torch.float32, 3, False, lambda text: None)
    floor = {"step_ms": {"true": 1.0}}
    found = decode._timed(parts, Setting(2, 5, 2), floor, "true", place)
    # what was timed is in capitals
    assert "".join(calls) == "eD" + "DDD" + "EEE" + "dE" * turns
    assert len(found["encoder_ms"]["repeats"]) == turns
    assert len(found["encoder_after_encoder_ms"]["repeats"]) == 3


def test_the_table_has_the_papers_figures_in_the_papers_setting_only(
    writehead, quick_chip, tmp_path, capsys
):
    path = tmp_path / "decode.json"
    code, out, _ = writehead("bench", "decode", *BOTH, *TINY, "--output", path)
    assert code == 0
    assert "TPUv2" not in out
    result = json.loads(path.read_text())
    for row in result["rows"]:
        assert row["paper"] is None
        row["paper"] = paper_row(row["preset"].replace("tiny", "wmt14"), Setting(1024, 128, 128))
    show_decode(result, Console(width=120))
    out = capsys.readouterr().out
    assert "TPUv2: the paper's Table 2" in out
    assert "Table 2, padded, as the paper's: µs a token, encoder + decoder" in out
    assert "Table 2, by true lengths" in out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    for name, some in (
        ("tiny/multi-head", ("1.7 + 46", "2 + 203")),
        ("tiny/multi-query", ("1.5 + 3.8", "1.6 + 32")),
        ("gain of multi-query", ("12.1×", "6.3×")),
    ):
        line = next(line for line in lines if line.startswith(name))
        assert all(figure in line for figure in some)
    assert "On a CPU ours is the plain path" in out
    assert max(map(len, out.split("\n\n")[1].splitlines())) <= 80


def test_one_way_of_reading_caches_can_be_asked_for(writehead, quick_chip, tmp_path):
    path = tmp_path / "decode.json"
    options = ("--preset=tiny/multi-query-local", *TINY, "--beam=1", "--padded", "--output", path)
    code, out, _ = writehead("bench", "decode", *options)
    assert code == 0
    [row] = json.loads(path.read_text())["rows"]
    assert set(row["measured"]) == {"ours, padded"}
    assert "by true lengths" not in out


@pytest.mark.parametrize(
    ("name", "batch", "source", "target", "decoder"),
    [
        ("wmt14/multi-query-local", 1024, 128, 128, 3.3),
        ("wmt14/multi-query-local", 512, 128, 128, None),
        ("wmt14/multi-query-local", 1024, 64, 128, None),
        ("wmt14/multi-query-local", 1024, 128, 256, None),
        ("wmt14-small/multi-query-local", 1024, 128, 128, None),
        ("wmt14/multi-head-1x128", 1024, 128, 128, None),
    ],
)
def test_the_papers_figure_is_that_of_its_own_setting(name, batch, source, target, decoder):
    row = paper_row(name, Setting(batch, source, target, beam=4))
    assert (row and row["decoder"]) == decoder


def test_a_language_model_is_timed_behind_its_contexts(writehead, quick_chip, tmp_path):
    path = tmp_path / "contexts.json"
    code, out, _ = writehead("bench", "decode", *LANGUAGE, *SMALL, "--output", path)
    assert code == 0
    result = json.loads(path.read_text())
    assert result["rows"] == []
    assert [row["context"] for row in result["contexts"]] == [24, 24, 40, 40]
    heads, query = result["contexts"][2:]
    assert heads["floor"]["attention_us"] == pytest.approx(8 * query["floor"]["attention_us"])
    assert heads["kv_bytes"] == 2 * 3 * 40 * 8 * 32 * 4  # layers, rows, positions, heads, k + v
    for row in result["contexts"]:
        found = row["measured"]["ours"]
        assert found["us_per_token"] == pytest.approx(found["step_ms"]["median"] * 1e3 / 3)
        alone = row["attention"]
        assert alone["kv_bytes"] * 2 == row["kv_bytes"]
        assert alone["bytes_in_turn"] == alone["sets"] * alone["kv_bytes"] < 64 << 20
        # so small that they may stay in the cache, where no memory's rate is to be seen
        assert "bytes_per_second" not in alone
        assert "share_of_floor" not in alone
    assert "attention: no GB/s and no share of the floor" in out
    assert "gain of multi-query" in out


def test_attention_behind_a_context_reads_more_than_the_cache_in_turn(
    writehead, quick_chip, monkeypatch, tmp_path
):
    monkeypatch.setattr(timing, "CACHE_BYTES", 20_000)
    path = tmp_path / "contexts.json"
    code, _, _ = writehead("bench", "decode", *LANGUAGE, *SMALL, "--output", path)
    assert code == 0
    result = json.loads(path.read_text())
    for row in result["contexts"]:
        alone = row["attention"]
        assert alone["bytes_in_turn"] >= 80_000
        assert alone["sets"] == max(2, -(-80_000 // alone["kv_bytes"]))
        seconds = alone["us"]["median"] * 1e-6
        assert alone["bytes_per_second"] == pytest.approx(alone["kv_bytes"] / seconds)
        assert alone["share_of_floor"] == pytest.approx(
            alone["bytes_per_second"] / result["chip"]["bandwidth"]
        )


@pytest.mark.parametrize("preset", ["tiny/multi-query", "tiny-lm/multi-query"])
def test_where_ours_fails_the_benchmark_does(writehead, quick_chip, monkeypatch, preset):
    def fails(*given: object, **options: object) -> None:
        raise BackendError("no kernel for this")

    monkeypatch.setattr("writehead.bench.decode.plain_decode", fails)
    monkeypatch.setattr("writehead.bench.context.stepped_greedy", fails)
    options = (*SMALL, "--context=24") if "lm" in preset else TINY
    code, out, err = writehead("bench", "decode", f"--preset={preset}", *options)
    assert (code, out) == (2, "")
    assert "no kernel for this" in err


def test_hugging_faces_growing_cache_is_held_against_the_floor_of_true_lengths(monkeypatch):
    def peer(model: object, setting: Setting) -> peers.Decode:
        return peers.Decode(lambda: None, lambda: None, setting.target, "does nothing")

    monkeypatch.setattr("writehead.bench.decode.marian_decode", peer)
    chip = cost.Chip("slow", 1e9, 1.0, 1e30, "made up")
    place = Place(chip, torch.device("cpu"), torch.float32, 1, True, lambda text: None)
    row = translation_row("x", config("translation", d=12, g=6, k=2, v=2), Setting(2, 3, 4), place)
    found = row["measured"]["Hugging Face"]
    assert found["lengths"] == "true"
    assert found["floor_step_ms"] == row["floor"]["step_ms"]["true"]
    assert row["floor"]["step_ms"]["true"] < row["floor"]["step_ms"]["padded"]


def test_of_a_row_that_hugging_face_has_not_nothing_is_told_but_why():
    told: list[str] = []
    chip = cost.Chip("slow", 1e9, 1.0, 1e30, "made up")
    place = Place(chip, torch.device("cpu"), torch.float32, 1, True, told.append)
    row = translation_row("x", config("translation"), Setting(2, 3, 4), place)
    assert "no multi-query or local" in row["measured"]["Hugging Face"]["absent"]
    assert not any("Hugging Face" in line for line in told)


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), BackendError("no kernel")], ids=["^C", "error"]
)
def test_where_nothing_was_measured_the_result_that_was_there_stays(
    writehead, monkeypatch, quick_chip, tmp_path, error
):
    def stop(*given: object, **options: object) -> None:
        raise error

    monkeypatch.setattr("writehead.cli.bench_runs.translation_row", stop)
    path = tmp_path / "decode.json"
    path.write_text("a whole result")
    command = ("--preset=tiny/multi-query", *TINY, "--beam=1", "--output", path, "--force")
    code, out, _ = writehead("bench", "decode", *command)
    assert (code, out) == (130 if isinstance(error, KeyboardInterrupt) else 2, "")
    assert path.read_text() == "a whole result"


def test_an_interrupted_run_keeps_what_it_has(monkeypatch, quick_chip, tmp_path):
    def stop(*given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("writehead.cli.bench_runs.language_row", stop)
    path = tmp_path / "decode.json"
    command = ("--preset=tiny/multi-query", *LANGUAGE, *TINY, "--beam=1", "--output", path)
    monkeypatch.setattr(sys, "argv", ["writehead", "bench", "decode", *map(str, command)])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 130
    result = json.loads(path.read_text())
    [row] = result["rows"]
    assert row["preset"] == "tiny/multi-query"
    assert result["partial"] is True


def test_rows_without_a_family_are_those_of_the_one_there_is_by_default(
    writehead, quick_chip, tmp_path
):
    path = tmp_path / "decode.json"
    command = ("--rows=multi-query", *TINY, "--beam=1", "--output", path)
    code, _, err = writehead("bench", "decode", *command)
    assert code == 0, err
    assert [row["preset"] for row in json.loads(path.read_text())["rows"]] == ["tiny/multi-query"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--preset=tiny/multi-quary"], "did you mean"),
        (["--preset=tiny", "--rows=multi-quary"], "Table 2 has no row 'multi-quary'"),
        (["--preset=tiny/multi-query", "--rows=multi-head"], "tiny/multi-query is one row"),
        (["--batch=0"], "--batch 0 is too little"),
        (["--vocabulary=0"], "--vocabulary 0 is too little; give 4 or more"),
        (["--vocabulary=1"], "--vocabulary 1 is too little"),
        (["--vocabulary=3"], "--vocabulary 3 is too little"),
        (["--target=-1"], "--target -1 is too little"),
        (["--target=257"], "--target 257 is past the 256 learned positions of tiny/multi-head"),
        (["--source=257"], "--source 257 is past the 256 learned positions of tiny/multi-head"),
        (
            ["--preset=tiny-lm/multi-query", "--context=64", "--target=257", "--plot=figures"],
            "--target 257 is past the 256 learned positions of tiny; give 256 or less",
        ),
        (["--preset=tiny-lm", "--source=16"], "--source is for translation models"),
        (["--preset=tiny-lm", "--target=16"], "--target is for translation models"),
        (["--preset=tiny-lm", "--beam=4"], "--beam is for translation models"),
        (["--preset=tiny-lm", "--true-lengths"], "--true-lengths is for translation models"),
        (["--beam=0"], "--beam 0 is too little"),
        (["--context=1"], "more context than steps"),
        (["--repeats=0"], "0 repeats cannot be timed"),
        (["--output=/dev/null/x.json"], "/dev/null is no folder, and one is wanted"),
        (["--plot=/dev/null"], "/dev/null is no folder, and one is wanted"),
        (["--compiled"], "--compiled is of steps in a graph, and needs a GPU"),
        (["--beam=1025"], "--beam 1025 is past the 1024 tokens of tiny/multi-head"),
    ],
)
def test_wrong_input_is_one_sentence_before_anything_is_measured(
    writehead, no_chip, arguments, words
):
    code, out, err = writehead("bench", "decode", "--device=cpu", *arguments)
    assert (code, out) == (2, "")
    assert words in err.splitlines()[-1]


def test_more_steps_than_context_cannot_be_timed():
    with pytest.raises(ValueError, match="more context than steps"):
        Context(batch=2, length=8, steps=8)


@pytest.mark.parametrize("window", [None, 4])
def test_plain_pytorch_in_a_graph_goes_where_greedy_steps_go(one_after_another, window):
    made = model(config("translation", window=window, tied=False))
    setting = Setting(batch=4, source=7, target=9)
    torch.manual_seed(1)
    decode = peers.graph_decode(made, setting, reorders=False)
    torch.manual_seed(1)
    state = made.start(peers.random_source(made, setting), setting.target)
    tokens = state.first
    for _ in range(setting.target):
        tokens = made.step(tokens, state).argmax(dim=1)
    for _ in range(2):  # a decoding leaves nothing behind for the next
        assert decode.run().tolist() == tokens.tolist()
    assert len(set(tokens.tolist())) > 1


@pytest.mark.parametrize("window", [None, 4])
def test_plain_beam_search_around_a_graph_finds_what_it_finds_without(one_after_another, window):
    made = model(config("translation", window=window, tied=False))
    setting = Setting(batch=3, source=7, target=9, beam=3)
    torch.manual_seed(1)
    decode = peers.graph_decode(made, setting, reorders=True)
    torch.manual_seed(1)
    state = made.start(peers.random_source(made, setting), setting.target, beam=3)
    expected = beam_search(made.step, state, peers.search_config(setting), end=1)
    for _ in range(2):
        found = decode.run()
        assert [one.tokens for [one] in found] == [one.tokens for [one] in expected]
        scores = [one.score for [one] in expected]
        assert [one.score for [one] in found] == pytest.approx(scores)
    assert any(len(set(one.tokens)) > 1 for [one] in expected)


@pytest.mark.parametrize(("beam", "reorders"), [(1, False), (3, True)])
def test_plain_pytorch_compiled_finds_the_same_and_compiles_before_the_capture(
    one_after_another, monkeypatch, beam, reorders
):
    calls, compiled_at, real = [], [], torch.compile

    def note(graph, inputs):
        compiled_at.append(len(calls))
        return graph

    def compile_noted(step, fullgraph):
        inner = real(step, fullgraph=fullgraph, backend=note)

        def outer(*given):
            calls.append(1)
            return inner(*given)

        return outer

    monkeypatch.setattr(torch, "compile", compile_noted)
    # checks that wait for numbers, which only a CPU does
    monkeypatch.setattr("writehead.model.transformer._within", lambda *given: True)
    monkeypatch.setattr("writehead.kernels.Visibility.check", lambda *given: None)
    made = model(config("translation", tied=False, decoder_layers=1))
    setting, found = Setting(batch=2, source=7, target=9, beam=beam), []
    for compiled in (True, False):
        torch.manual_seed(1)
        decode = peers.graph_decode(made, setting, reorders=reorders, compiled=compiled)
        if compiled:
            assert 1 <= max(compiled_at) <= peers.WARM_CALLS < len(calls)
            assert decode.how.endswith("torch.compile")
        result = decode.run()
        found.append([one.tokens for [one] in result] if reorders else result.tolist())
    assert found[0] == found[1]


def test_a_compiled_peer_has_a_column_of_its_own():
    slow, fast = ({"step_ms": {"median": ms}} for ms in (2.0, 1.0))
    row = {"measured": {"PyTorch, sdpa": slow, "PyTorch, compiled, sdpa": fast}}
    assert quickest(row, "PyTorch") is slow
    assert quickest(row, "PyTorch, compiled") is fast


def test_beams_without_reordering_share_the_source_and_have_rows_of_their_own(one_after_another):
    made = model(config("translation"))
    decode = peers.graph_decode(made, Setting(2, 7, 5, beam=4), reorders=False)
    tokens = decode.run().view(2, 4)
    assert (tokens == tokens[:, :1]).all()  # all begin alike, and nothing sets them apart


@pytest.mark.parametrize("beam", [1, 3])
def test_hugging_face_is_timed_with_the_sizes_of_ours(beam):
    pytest.importorskip("transformers")
    made = model(config("translation", d=12, h=6, g=6, k=2, v=2), dtype=torch.float32)
    decode = peers.marian_decode(made, Setting(2, 7, 5, beam=beam))
    for _ in range(2):  # generate changes what it is given
        decode.start()
        decode.run()  # raises unless it takes as many steps as asked
    assert decode.how.startswith("transformers 5")


@pytest.mark.parametrize(
    ("task", "changes", "words"),
    [
        ("translation", {"d": 12, "k": 2, "v": 2}, "no multi-query or local"),
        ("translation", {"d": 12, "g": 6, "k": 2, "v": 2, "window": 3}, "no multi-query or local"),
        ("translation", {"g": 6}, "Marian needs h k = d"),
        ("language", {"g": 6}, "Marian is a translation model"),
    ],
)
def test_models_that_hugging_face_has_not_are_said(task, changes, words):
    with pytest.raises(BackendError, match=words):
        peers.marian_decode(model(config(task, **changes)), Setting(2, 3, 4))


def test_of_two_backends_the_quicker_one_counts():
    slow, fast = ({"step_ms": {"median": ms}} for ms in (2.0, 1.0))
    row = {"measured": {"PyTorch, sdpa": slow, "PyTorch, eager": fast, "ours, padded": slow}}
    assert quickest(row, "PyTorch") is fast
    assert quickest(row, "ours, padded") is slow
    assert quickest(row, "Hugging Face") is None
    row["measured"]["PyTorch, eager"] = {"absent": "no"}
    assert quickest(row, "PyTorch") is slow


@pytest.mark.parametrize(
    ("gpu", "swept", "other"), [(True, "wmt14", "tiny"), (False, "tiny", "wmt14")]
)
def test_a_sweep_asks_for_positions_of_the_models_that_its_device_sweeps(
    monkeypatch, gpu, swept, other
):
    plan = DecodePlan(
        models={},
        batches=[1],
        source=20,
        target=30,
        beams=[1],
        vocabulary=None,
        contexts=[64],
        language_batches=[1],
        lengths=("true",),
        sweeps=True,
        gpu=gpu,
    )
    short = dataclasses.replace(FAMILIES[other], target_positions=29)
    monkeypatch.setitem(FAMILIES, other, short)
    assert dataclasses.replace(plan) == plan
    short = dataclasses.replace(FAMILIES[swept], target_positions=28)
    monkeypatch.setitem(FAMILIES, swept, short)
    with pytest.raises(ConfigError, match=f"past the 28 learned positions of {swept}; give 28"):
        dataclasses.replace(plan)


def test_a_plan_keeps_its_presets_apart_by_task():
    models = {"a": config("translation"), "b": config("language")}
    positions = models["a"].source_positions, models["a"].target_positions
    plan = DecodePlan(
        models=models,
        batches=[1],
        source=positions[0],
        target=positions[1],
        beams=[1],
        vocabulary=None,
        contexts=[64, 32],
        language_batches=[1],
        lengths=("true",),
    )
    [translation] = plan.of_task("translation").values()
    [language] = plan.of_task("language").values()
    assert (translation.source_positions, translation.target_positions) == positions
    assert (language.source_positions, language.target_positions) == (0, 64)
    assert dataclasses.replace(plan, lengths=("padded",)).lengths == ("padded",)
