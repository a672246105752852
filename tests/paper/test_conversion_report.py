"""The section about conversions says what result files say, here with figures the tests choose."""

import re
from pathlib import Path

import pytest
from test_report import TEMPLATES, cells, write, write_row

from writehead.errors import RunError
from writehead.interop.convert import converted_config
from writehead.paper.conversion import BASE, SPEED, VARIANTS
from writehead.paper.presets import rows
from writehead.paper.report import CONVERSION_MARKS, make_report
from writehead.paper.results import result_path

MODELS = rows("wmt14-small")


def write_conversion(folder: Path, row: str, bleu: float, *, seed: int = 0, **changes) -> Path:
    template, variant = TEMPLATES["table1"], VARIANTS.get(row)
    model = converted_config(MODELS[BASE], variant.g) if variant else MODELS[BASE]
    result = {
        **{name: template[name] for name in ("format", "environment", "data", "family")},
        **{"table": "conversion", "scale": "small", "row": row, "seed": seed, "base": "ab"},
        **{"steps": 300, "base_steps": 6000, "model": model.to_json()},
        "scores": {
            name: {"ln_ppl": 1.5, "bleu": {"greedy": {"intl": bleu}, "beam-4": {"intl": bleu + 1}}}
            for name in ("dev", "test")
        },
    }
    return write(result_path(folder, "conversion", "small", row, seed), result | changes)


@pytest.fixture
def results(tmp_path) -> Path:
    folder = tmp_path / "results"
    for row, bleu in ((BASE, 25.0), ("g1-mean", 3.25), ("g1-aligned", 14.5)):
        write_conversion(folder, row, bleu)
    for seed in range(3):
        write_conversion(folder, "g1-aligned-5-teacher", 23.5 + seed / 10, seed=seed)
    write_conversion(folder, "g1-aligned-5", 23.0)
    write_conversion(folder, "g2-low-rank-5", 24.0)
    return folder


def write_speed(folder: Path) -> None:
    decode = [
        {
            "preset": name,
            "model": MODELS[BASE].to_json(),
            "setting": {"batch": 1000, "source": 128, "target": 128, "beam": beam},
            "floor": {"step_ms": {"true": ms * beam / 2}},
            "measured": {"ours, true lengths": {"step_ms": {"median": ms * beam}}},
        }
        for name, ms in ((BASE, 2.0), ("g1", 0.5))
        for beam in (1, 4)
    ]
    result = {name: TEMPLATES["table1"][name] for name in ("format", "environment", "family")}
    result |= {"table": "conversion", "scale": "small", "row": SPEED, "dtype": "bfloat16"}
    write(result_path(folder, "conversion", "small", SPEED), result | {"decode": decode})


def test_the_tables_have_quality_bytes_and_times(results):
    write_speed(results)
    write_row(results, "table1", "multi-query", [1.5])
    report = make_report(results)
    methods = [line.strip("|").split("|") for line in report.conversion.splitlines() if "|" in line]
    assert ["1", "aligned", "yes", "15.50", "–", "–", "24.60 ± 0.10", "–"] in methods
    assert ["1", "aligned", "no", "15.50", "–", "–", "24.00", "–"] in methods
    assert ["1", "mean", "no", "4.25", "–", "–", "–", "–"] in methods
    assert ["2", "low-rank", "no", "–", "–", "–", "25.00", "–"] in methods
    assert not [line for line in methods if line[0] == "4"]
    summary = cells(report.conversion)
    quality = ["1.500", "25.00", "25.00", "26.00"]
    assert summary["multi-head"] == ["12,288", *quality, "2 (≥ 1)", "8 (≥ 4)"]
    best = summary["1 write-head, aligned, 5%, teacher"]
    assert (best[0], best[2], best[-2]) == ("1,536", "23.60 ± 0.10", "0.5 (≥ 0.25)")
    assert summary["2 write-heads, low-rank, 5%"][-1] == "–"
    assert summary["multi-query from scratch"][0] == "1,536"
    assert "1,000 sentences" in report.conversion
    for label in ("converted, 5% of steps", "multi-query from scratch"):
        assert label in report.figures["conversion.svg"]


def test_the_page_is_filled_and_without_results_has_no_section(writehead, results, tmp_path):
    page, begin, end = tmp_path / "docs/converting.md", *CONVERSION_MARKS
    page.parent.mkdir()
    page.write_text(f"# Page\n{begin}\nold\n{end}\n")
    (tmp_path / "none").mkdir()
    for folder, has_section in (("none", False), ("results", True)):
        command = ("report", page.with_name("results.md"), f"--results={tmp_path / folder}")
        assert writehead(*command)[0] == 0
        assert ("not been measured" in page.read_text(encoding="utf-8")) == (not has_section)
        assert writehead(*command, "--check")[0] == 0
    text = page.read_text(encoding="utf-8")
    assert re.fullmatch(rf"# Page\n{begin}\n## .*\(figures/conversion.svg\)\n{end}\n", text, re.S)
    assert "write-heads" not in page.with_name("results.md").read_text(encoding="utf-8")
    assert writehead("report", results / "report.md", f"--results={results}")[0] == 0
    assert cells((results / "report.md").read_text(encoding="utf-8"))["multi-head"]
    assert "## Quality and speed" in (results / "report.md").read_text(encoding="utf-8")


def test_rows_of_two_models_are_refused(results):
    write_conversion(results, "g1-first", 2.0, base="cd")
    with pytest.raises(RunError, match="another multi-head model"):
        make_report(results)
    path = write_conversion(results, "g1-first", 2.0, scores={})
    with pytest.raises(RunError, match=r"lacks scores\.dev"):
        make_report(results)
    path.unlink()
    assert make_report(results).conversion
