"""`bench serve`: its statistics, its clients, and the baselines that it measures."""

import json
import shutil

import pytest

pytest.importorskip("aiohttp")

from servers import models, serving
from texts import engine, sentences
from writehead.bench.serve import (
    Load,
    Process,
    Result,
    Target,
    at_equal_p95,
    check_server,
    goodput,
    measure,
    mixed_texts,
    percentiles,
    summarize,
)
from writehead.bench.static_batching import baseline
from writehead.config import DecodeConfig
from writehead.errors import ConfigError, RunError
from writehead.serving.models import Served

LINES = sentences(30, seed=8, longest=5)


def silent(seconds):
    pass


def greedy(engine):
    outputs = engine.translate(LINES, DecodeConfig(beam=1))
    return dict(zip(LINES, (output.text for output in outputs), strict=True))


def ask(url, api="writehead", size=1, **options):
    """Statistics of three clients for a moment, and of clients at random times."""
    target = Target(url=url, api=api, **options)
    return [
        measure(target, load, LINES, silent, size)
        for load in (Load(seconds=0.3, concurrency=3), Load(seconds=0.3, rate=30.0, concurrency=8))
    ]


def check(measured, expected):
    for row in measured:
        assert row["requests"] > 0
        assert row["errors"] == {}
        assert row["e2el_ms"]["p50"] <= row["e2el_ms"]["p99"]
        for one in row["results"]:
            assert one.answers == [*map(expected, one.texts)]


@pytest.mark.parametrize("batching", ["continuous", "static", "ctranslate2"])
def test_every_batching_gives_the_answers_of_the_engine(batching):
    if batching == "ctranslate2":
        pytest.importorskip("ctranslate2")
    one = engine("translation", v=5)
    one.model.float()  # CTranslate2 has no float64
    expected = greedy(one)
    baseline(batching, one)
    with serving([Served("toy-en-de", one, ("en", "de"))]) as url:
        measured = ask(url, beam=1)
    check(measured, expected.get)
    assert all(row["tokens_per_second"] > 0 for row in measured)
    assert all(row["memory_bytes"]["max"] > 0 for row in measured)


def test_other_apis_and_streams():
    served = models()
    translations = greedy(served[0].engine)
    beams = dict(zip(LINES, (one.text for one in served[0].engine.translate(LINES)), strict=True))
    options = DecodeConfig(max_length=9)
    texts = [one.text for one in served[1].engine.generate(LINES, options)]
    completions = dict(zip(LINES, texts, strict=True))
    with serving(served) as url:
        check(ask(url, "libretranslate"), beams.get)
        check(ask(url, "libretranslate", size=4), beams.get)
        check(ask(url, size=7, beam=4), beams.get)
        streamed = ask(url, beam=1, stream=True)
        check(streamed, translations.get)
        assert all(row["ttft_ms"]["p50"] <= row["e2el_ms"]["p99"] for row in streamed)
        check(ask(url, "openai", model="writer", max_tokens=9), completions.get)
        streamed = ask(url, "openai", model="writer", max_tokens=9, stream=True)
        check(streamed, completions.get)
        assert all(row["tokens_per_second"] > 0 for row in streamed)
        [failed, _] = ask(url, "openai", model="nobody")
        assert failed["errors"] == {"404": failed["requests"]}
        with pytest.raises(RunError, match=r"404: .*nobody"):
            check_server(Target(url=url, api="openai", model="nobody"), LINES)
        check_server(Target(url=url, api="writehead"), LINES)


def test_statistics():
    values = [i / 1e3 for i in range(101)]
    assert percentiles(values) == pytest.approx(
        {"mean": 50.0, "p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0}
    )
    done = [Result(["a"], 1.0, 1.0 + i / 10, tokens=3) for i in range(10)]
    failed = [Result(["a"], 1.0, 9.0, error="503")]
    seen = [Process(i, 5.0 + i, 2.0 * i) for i in range(4)]
    figures = summarize([*done, *failed], 2.0, seen)
    assert figures["requests_per_second"] == 5.0
    assert figures["tokens_per_second"] == 15.0
    assert figures["errors"] == {"503": 1}
    assert figures["memory_bytes"] == {"quarter": 6.0, "end": 8.0, "max": 8.0}
    assert (figures["cores"], figures["cpu_ms_per_request"]) == (2.0, 400.0)
    assert goodput([*done, *failed], 2.0, 450.0) == 2.5


def test_throughput_at_equal_latency():
    rows = [
        {"batching": name, "requests_per_second": rate, "e2el_ms": p95 and {"p95": p95}}
        for name, rate, p95 in [
            ("static", 4.0, 100.0),
            ("static", 7.0, 300.0),
            ("static", 6.0, 500.0),  # slower in both
            ("continuous", 11.0, 200.0),
            ("continuous", 15.0, 280.0),
            ("continuous", 17.0, 320.0),
            ("continuous", 0.0, None),  # all requests failed
            ("ctranslate2", 5.0, 60.0),
        ]
    ]
    first, second = at_equal_p95(rows, "static")
    assert first == {
        "p95_ms": 100.0,
        "requests_per_second": {"static": 4.0, "continuous": None, "ctranslate2": 5.0},
        "ratio": {"continuous": None, "ctranslate2": 1.25},
    }
    assert second["p95_ms"] == 300.0
    assert second["requests_per_second"] == {"static": 7.0, "continuous": 16.0, "ctranslate2": 5.0}
    assert second["ratio"]["continuous"] == pytest.approx(16 / 7)


def test_texts_have_mixed_lengths():
    texts = mixed_texts(200, 3, 60, seed=1)
    words = sorted(len(text.split()) for text in texts)
    assert words[0] == 3
    assert 55 <= words[-1] <= 60
    assert 8 < words[100] < 22  # the median is near the geometric mean
    assert texts == mixed_texts(200, 3, 60, seed=1)
    with pytest.raises(ConfigError, match="range"):
        mixed_texts(3, 5, 4, seed=1)


def test_a_server_that_fails_to_start_is_not_waited_for(small_runs, tmp_path, refused):
    run = tmp_path / "run"
    shutil.copytree(small_runs / "translation", run)
    (run / "model.safetensors").write_bytes(b"")
    assert "no server answers" in refused("bench", "serve", run, "--languages", "en-de")


def test_the_command_measures_a_url_and_writes_a_record(writehead, refused, tmp_path):
    with serving(models()) as url:
        options = ["--duration", "0.2", "--max-concurrency", "2", "--words", "2-5"]
        paths = ["--output", tmp_path / "a.json", "--plot", tmp_path / "a.svg"]
        code, out, _ = writehead("bench", "serve", url, *options, *paths)
    assert (code, "req/s" in out) == (0, True)
    record = json.loads((tmp_path / "a.json").read_text())
    [row] = record["rows"]
    assert (row["batching"], row["errors"]) == ("server", {})
    assert row["goodput"] <= row["requests_per_second"]
    assert "results" not in row
    assert "<svg" in (tmp_path / "a.svg").read_text()
    assert "--words 5" in refused("bench", "serve", "--words", "5")
    assert "did you mean 'openai'" in refused("bench", "serve", "--api", "open-ai")
