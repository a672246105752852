"""The report says what the result files say: here results with figures that the tests choose."""

import copy
import json
import re
import shutil
from pathlib import Path

import pytest

from writehead.errors import RunError
from writehead.paper.bundled import bundled_table
from writehead.paper.claims import CLAIMS, Scores, judge, verdict
from writehead.paper.experiments import EXPERIMENTS
from writehead.paper.report import CARD_MARKS, MARK, make_report
from writehead.paper.results import read_results, result_path
from writehead.paper.tables import TABLE_1, TABLE_3

ROOT = Path(__file__).parents[2]
CARD = Path("src/writehead/bundled/MODEL_CARD.md")
TEMPLATES = {
    table: json.loads((ROOT / "results" / table / place).read_text(encoding="utf-8"))
    for table, place in (
        ("table1", "small/multi-query-seed0.json"),
        ("table2", "paper/multi-query.json"),
        ("table3", "small/multi-query-seed0.json"),
    )
}
WORSE, CLOSER, NEARER, HIGHEST, WINDOW, ADDITIVE, LM_WORSE, LM_BETTER = CLAIMS


def write(path: Path, result: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result), encoding="utf-8")
    return path


def write_row(folder: Path, table: str, row: str, losses, *, scale="small", **changes) -> Path:
    """Writes a row with one seed per loss; all its figures follow from the loss."""
    experiment, place = EXPERIMENTS[table, scale], changes.pop("place", scale)
    for seed, loss in enumerate(losses):
        result = copy.deepcopy(TEMPLATES[table])
        result |= {"scale": scale, "family": experiment.family, "row": row, "seed": seed}
        result["train"] = {**experiment.train.to_json(), "seed": seed}
        for number, part in enumerate(result["scores"].values()):
            part |= {"ln_ppl": loss, "ppl_per_word": 100 * loss}
            for i, bleu in enumerate(part.get("bleu", {}).values()):
                bleu["intl"] = 40.0 - 10.0 * loss + number + i
        path = write(result_path(folder, table, place, row, seed), result | changes)
    return path


def write_table(folder: Path, table: str, losses: dict[str, list[float]]) -> Path:
    """Writes rows of the small scale, by the paper's names."""
    paper = TABLE_1 if table == "table1" else TABLE_3
    names = dict(zip((row.row for row in paper), EXPERIMENTS[table, "small"].rows, strict=True))
    for row, values in losses.items():
        write_row(folder, table, names[row], values)
    return folder


def paper_losses(noise: float = 0.001) -> dict[str, list[float]]:
    """The paper's ln(PPL), with three seeds of the first two rows."""
    losses = {row.row: [row.loss] for row in TABLE_1}
    for row in ("multi-head", "multi-query"):
        losses[row] = [losses[row][0] + shift for shift in (-noise, 0.0, noise)]
    return losses


def scores(folder: Path) -> Scores:
    return Scores("table1", "small", read_results(folder)["table1", "small"])


def cells(text: str) -> dict[str, list[str]]:
    """The rows of all tables in Markdown, by their first cell."""
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return {line[0]: line[1:] for line in lines}


def test_every_claim_holds_in_the_papers_own_tables():
    for claim in CLAIMS:
        findings = judge(claim, None)
        assert [one.measure.key for one in findings] == list(claim.measures)
        assert all(one.margin > 1e-9 for one in findings), claim.text
        assert judge(claim, Scores(claim.table, "small", [])) == []


def test_verdicts_follow_the_figures(tmp_path):
    def found(name, noise=0.001, **changes):
        changed = {row.replace("_", "-"): values for row, values in changes.items()}
        own = scores(write_table(tmp_path / name, "table1", paper_losses(noise) | changed))
        return {one: verdict(judge(one, own)) for one in CLAIMS if one.table == "table1"}

    same = found("same")
    assert same[WORSE] == same[CLOSER] == "supported"
    assert same[HIGHEST] == "contradicted"  # these BLEU scores follow ln(PPL)
    head, query = (paper_losses()[row] for row in ("multi-head", "multi-query"))
    swapped = found("swapped", multi_head=query, multi_query=head, multi_head_local=[1.437])
    assert (swapped[WORSE], swapped[HIGHEST]) == ("contradicted", "supported")
    far = found("far", multi_query=[1.470, 1.471, 1.472])
    assert (far[WORSE], far[CLOSER]) == ("supported", "contradicted")
    assert set(found("noisy", noise=0.05).values()) == {"not decided"}


def test_the_noise_is_students_t_times_the_pooled_deviation(tmp_path):
    losses = {"multi-head": [1.40, 1.42, 1.44], "multi-query": [1.50, 1.54]}
    write_table(tmp_path, "table1", paper_losses() | losses)
    first = judge(WORSE, scores(tmp_path))[0]
    # squares about the means: 2 × 0.02² and 2 × 0.02², over 2 + 1 degrees of freedom; t(3) = 3.18
    pooled = (4 * 0.02**2 / 3) ** 0.5
    assert first.margin == pytest.approx(1.52 - 1.42)
    assert first.noise == pytest.approx(3.18 * pooled * (1 / 3 + 1 / 2) ** 0.5)


def test_the_tables_show_the_papers_figures_beside_ours_and_what_was_not_run(tmp_path):
    losses = paper_losses()
    del losses["multi-query-local"]
    write_table(tmp_path, "table1", losses)
    write_table(tmp_path, "table3", {row.row: [row.loss / 100] for row in TABLE_3})
    write_row(tmp_path, "table1", "multi-query", [1.6], scale="tiny")  # not shown beside another
    report = make_report(tmp_path)
    one, three = (cells(part) for part in re.split("## Table [123]", report.text)[1::2])
    assert one["multi-head"][:4] == ["1.424", "1.424 ± 0.001", "26.7", "25.8 ± 0.0"]
    assert one["multi-query-local"][1::2] == ["not run yet"] * 4
    assert one["multi-head-1x128"][4:6] == ["–", "25.8"]
    assert three["multi-query"] == ["30.2", "30.2"]
    assert re.search(r"Table 2.*\n\nNot run yet\.\n", report.text)
    assert "tiny 1M" not in report.text
    assert sorted(report.figures) == ["table1.svg", "table3.svg"]
    assert "not run yet" in report.figures["table1.svg"]


def test_table_2_has_times_and_speedups(tmp_path):
    for row, slow in (("multi-head", 2.0), ("multi-query", 0.5)):
        result = copy.deepcopy(TEMPLATES["table2"]) | {"row": row}
        result["training"]["us_per_token"] = 2.9
        for one in result["decode"]:
            for label, part in (("ours, padded", 1), ("ours, true lengths", 2)):
                us = slow * one["setting"]["beam"] / part
                one["measured"][label]["us_per_token"] = {"encoder": 0.25, "decoder": us}
        write(result_path(tmp_path, "table2", "paper", row), result)
    table = cells(make_report(tmp_path).text)
    assert table["multi-head"] == [
        *("13.2", "2.9", "1.7 + 46", "0.25 + 2", "0.25 + 1", "2 + 203", "0.25 + 8", "0.25 + 4")
    ]
    assert table["multi-head-local"][1] == "not run yet"
    speedups = ["1.0×", "1.0×", "12.1×", "4.0×", "4.0×", "6.3×", "4.0×", "4.0×"]
    assert table["speedup of multi-query"] == speedups


def test_a_small_number_of_sequences_is_written_in_full(tmp_path):
    data = copy.deepcopy(TEMPLATES["table1"]["data"])
    data["splits"]["train"]["sequences"] = 1987
    write_row(tmp_path, "table1", "multi-head", [1.4], scale="tiny", data=data)
    assert "1,987 pairs" in make_report(tmp_path).text


def test_a_report_replaces_no_file_of_others(writehead, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_table(tmp_path / "results", "table1", paper_losses())
    write_table(tmp_path / "mine", "table1", {"multi-head": [1.4]})
    document, picture = Path("docs/results.md"), Path("docs/figures/table1.svg")
    assert "no folder docs" in refused("report")
    assert not document.parent.exists()
    assert writehead("report", "--results=results")[0] == 0
    assert (Path("results/report.md").is_file(), document.exists()) == (True, False)
    document.parent.mkdir()
    assert writehead("report")[0] == 0
    text, drawn = document.read_text(encoding="utf-8"), picture.read_bytes()
    assert text.startswith(MARK)
    assert (writehead("report")[0], picture.read_bytes()) == (0, drawn)
    assert writehead("report", "--check") == (0, "", "")
    document.write_text(text.replace("1.424", "1.324"), encoding="utf-8")
    assert writehead("report", "--check")[0] == 1
    assert writehead("report", "--results=mine")[0] == 0
    assert Path("mine/report.md").is_file()
    for path in (document, picture):
        before = path.read_text(encoding="utf-8")
        path.write_text("notes\n")
        code, _, err = writehead("report")
        assert (code, f"{path} was not generated" in err) == (2, True)
        assert path.read_text() == "notes\n"
        path.write_text(before, encoding="utf-8")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scale": "paper", "place": "small"}, "move it to"),
        ({"train": {**EXPERIMENTS["table1", "small"].train.to_json(), "steps": 5}}, "steps is 5"),
        ({"data": {**TEMPLATES["table1"]["data"], "fingerprint": "other"}}, "dataset differs"),
        ({"format": 7}, "format is 7"),
        ({"scores": {}}, "lacks scores.dev"),
    ],
)
def test_results_that_cannot_be_compared_are_refused(tmp_path, changes, words):
    write_row(tmp_path, "table1", "multi-head", [1.4])
    write_row(tmp_path, "table1", "multi-query", [1.5], **changes)
    with pytest.raises(RunError, match=words):
        make_report(tmp_path)


@pytest.fixture
def project(tmp_path) -> Path:
    """A project with the results of the bundled model and its card."""
    shutil.copytree(ROOT / "results" / "bundled", tmp_path / "results" / "bundled")
    (tmp_path / CARD).parent.mkdir(parents=True)
    (tmp_path / CARD).write_text(f"# Card\n{CARD_MARKS[0]}\nold\n{CARD_MARKS[1]}\nlimits\n")
    return tmp_path


def test_the_model_card_has_the_figures_of_the_bundled_model(writehead, project):
    command = ("report", project / "out.md", f"--results={project / 'results'}")
    assert writehead(*command)[0] == 0
    card = (project / CARD).read_text(encoding="utf-8")
    assert re.fullmatch(r"# Card\n<!-- figures -->\n\|.*\n<!-- /figures -->\nlimits\n", card, re.S)
    quantized = json.loads((project / "results/bundled/int8.json").read_text())
    row = cells(card)["6 bits, in int8"]
    assert row[1] == f"{quantized['ln_ppl']:.3f}"
    found = json.loads((project / "results/bundled/first-lines.json").read_text())["first_lines"]
    assert row[-1] == f"{found['greedy']['kept']} / {found['beam-4']['kept']}"
    assert cells((project / "out.md").read_text(encoding="utf-8"))["6 bits, in int8"] == row
    (project / CARD).write_text(card.replace(row[1], "9.999"), encoding="utf-8")
    assert writehead(*command, "--check")[0] == 1


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("float32", {"sentences": 5}, "do not match"),
        ("speed", {"fingerprint": "0"}, "not measured with the bundled weights"),
        ("quantized", {"quantization": None}, "do not match"),
        ("int8", {"sentences": 5}, "do not match"),
        ("int8", {"fingerprint": "0"}, "not measured with the bundled weights"),
        ("first-lines", {"fingerprint": "0"}, "not measured with the bundled weights"),
        ("first-lines", {"first_lines": {}}, "greedy"),
        ("float32", {"ln_ppl": "x"}, "ln_ppl"),
    ],
)
def test_bundled_files_that_do_not_belong_together_are_refused(project, name, changes, words):
    path = project / "results" / "bundled" / f"{name}.json"
    write(path, json.loads(path.read_text()) | changes)
    with pytest.raises(RunError, match=words):
        bundled_table(project / "results")


def test_our_own_document_and_card_say_what_our_own_results_give(writehead, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert writehead("report", "--check") == (0, "", "")
