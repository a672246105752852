"""Records of training and translation, and the chart and the table of a record."""

import json
import time
from pathlib import Path

import pytest
import torch

from texts import sentences
from trainings import CONFIG, MODEL, SETTINGS, pair_dataset
from writehead import __version__, cost
from writehead.bench import translate
from writehead.bench.plots import markdown_table, translate_table
from writehead.bench.translate import step_clock
from writehead.config import DecodeConfig
from writehead.data.batches import PackedBatches
from writehead.data.dataset import Dataset
from writehead.engine import Engine
from writehead.engine.scheduler import Stats
from writehead.interop.pretrained import RunFacts


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return pair_dataset(tmp_path_factory.mktemp("pairs"))


def test_a_result_says_what_made_it_and_adds_up(bench, dataset):
    options = ("--device=cpu", *SETTINGS, "--dataset", dataset, "--steps=3")
    result = bench("train", "--preset=tiny/multi-query", *options)
    result, facts = result["rows"][0] | result, result["environment"]
    assert facts["versions"]["writehead"] == __version__
    assert facts["commit"] is None or len(facts["commit"].rstrip("+")) == 40
    positions = CONFIG.rows * CONFIG.target_length
    assert result["us_per_token"] == pytest.approx(result["step_ms"] * 1e3 / positions)
    low, high = result["step_ms_spread"]
    assert low <= result["step_ms"] <= high
    floor = result["operations"] / result["matrix_rate"]
    assert result["utilisation"] == pytest.approx(floor / (result["step_ms"] / 1e3))
    assert result["floor_us_per_token"] == pytest.approx(floor / positions * 1e6)
    # operations and labels are those of the batches that were timed
    split = Dataset.open(dataset).split("train")
    batches = PackedBatches(split, CONFIG.rows, 48, 48, seed=CONFIG.seed)
    timed = [next(batches) for _ in range(5)][2:]
    assert result["fill"] == pytest.approx(sum(b.tokens for b in timed) / 3 / (4 * 48))
    setting = cost.Setting(CONFIG.rows, 48, 48)
    counts = [cost.training_step(MODEL, setting, b.visible_pairs()).operations for b in timed]
    assert result["operations"] == pytest.approx(sum(counts) / 3)


@pytest.mark.slow
def test_a_file_is_timed_from_loading_to_the_last_line(bench, small_runs, tmp_path):
    lines, run = ["", *sentences(7)], small_runs / "translation"
    (tmp_path / "text").write_text("\n".join(lines))
    options = ("--input", tmp_path / "text", "--device=cpu", "--no-peers")
    result = bench("translate", run, *options, "--repeats=2")
    assert (result["sentences"], result["quantization"]) == (8, None)
    facts = RunFacts.read(run)
    assert (result["fingerprint"], result["bytes"]) == (facts.fingerprint, facts.bytes)
    found = result["engines"]["ours"]
    assert 0 < found["load_s"] < found["first_sentence_s"]
    engine = Engine.load(run, "cpu")
    for search, beam in (("greedy", 1), ("beam-4", 4)):
        one = found["searches"][search]
        outputs = engine.translate(lines, DecodeConfig(beam=beam, alpha=0.6))
        tokens = sum(len(engine.tokenizer.encode(output.text)) + 1 for output in outputs)
        assert one["tokens"] == tokens
        assert len(one["seconds"]["repeats"]) == 2
        assert one["sentences_per_second"] == pytest.approx(8 / one["seconds"]["median"])
        assert one["tokens_per_second"] == pytest.approx(tokens / one["seconds"]["median"])
        assert 0 < one["step_share"] < 1
    half = bench("translate", run, *options, "--dtype=bfloat16", "--beam=1")
    searches = {name: one["searches"] for name, one in half["engines"].items()}
    equal = {name: one["greedy"]["equal_lines"] for name, one in searches.items()}
    assert equal["ours"] == 8
    assert 1 <= equal["ours, float32"] <= 8  # one line is empty


def test_steps_are_clocked_alone(small_runs, monkeypatch):
    engine, lines = Engine.load(small_runs / "translation", "cpu"), sentences(5)

    def clock(work, device):
        work()
        return 0.25

    monkeypatch.setattr(translate, "clocked", clock)
    engine.scheduler.stats = Stats()
    with step_clock(torch.device("cpu")) as seconds:
        list(engine.translate(lines, DecodeConfig(beam=1, max_length=30)))
    assert seconds() == 0.25 * engine.scheduler.stats.steps > 0.0
    clocked = seconds()
    list(engine.translate(lines, DecodeConfig(beam=1, max_length=30)))
    assert seconds() == clocked


@pytest.mark.gpu
def test_steps_of_cuda_graphs_are_clocked_on_the_device(small_runs):
    engine, lines = Engine.load(small_runs / "translation", "cuda"), sentences(50)
    list(engine.translate(lines))  # captures the graphs
    begin = time.perf_counter()
    with step_clock(torch.device("cuda")) as seconds:
        list(engine.translate(lines))
    assert 0 < seconds() < time.perf_counter() - begin


ROOT = Path(__file__).parents[2]
RECORD = ROOT / "results" / "decoding" / "decode-systems.json"


def test_the_chart_and_the_table_in_the_readme_have_every_system(writehead, tmp_path):
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    code, out, err = writehead("bench", "plot", RECORD, tmp_path / "plots", "--table")
    assert code == 0, err
    names = ["decoding-dark.svg", "decoding-light.svg"]
    assert sorted(one.name for one in (tmp_path / "plots").iterdir()) == names
    for name in names:
        drawn = (tmp_path / "plots" / name).read_text()
        # matplotlib names each text in a comment before its shapes
        for label in ("writehead, multi-query", "CTranslate2, multi-head", "hardware floor"):
            assert f"<!-- {label}" in drawn
        assert record["environment"]["hardware"]["device"] in drawn
    assert out == markdown_table(record)
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines()]
    assert lines[0][1:3] == ["batch 1, greedy", "batch 1, beam 4"]
    table = {name: cells for name, *cells in lines}
    times = {
        (row["setting"]["batch"], row["setting"]["beam"]): row["measured"]["CTranslate2"]
        for row in record["rows"]
        if row["kind"] == "multi-head"
    }
    columns = ((1, 1), (1, 4), (1024, 1), (1024, 4))
    expected = [f"{times[column]['step_ms']['median']:.3g}" for column in columns]
    assert table["CTranslate2, multi-head"] == expected
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"<!-- decode table -->\n{out}<!-- /decode table -->" in readme


@pytest.mark.parametrize(("name", "file"), [("few", "decode-few"), ("cpu", "decode-cpu")])
def test_the_tables_of_decoding_are_those_of_the_records(name, file):
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    record = json.loads((RECORD.parent / f"{file}.json").read_text(encoding="utf-8"))
    assert f"<!-- {name} table -->\n{markdown_table(record)}<!-- /{name} table -->" in page


def test_the_table_of_translation_on_a_cpu_is_that_of_the_record():
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    record = json.loads((RECORD.parent / "translate-cpu.json").read_text(encoding="utf-8"))
    table = translate_table(record)
    assert f"<!-- cpu translate table -->\n{table}<!-- /cpu translate table -->" in page
    speed = record["engines"]["ours, int8"]["searches"]["greedy"]["sentences_per_second"]
    assert f"| writehead, int8 | {speed:.3g} |" in table
