"""The report says what result files say: here those of a table, with figures the tests choose."""

import copy
import json
import re
from pathlib import Path

import pytest

from writehead.errors import RunError
from writehead.paper.claims import CLAIMS, judge
from writehead.paper.experiments import EXPERIMENTS
from writehead.paper.report import BEGIN, END, make_report, markdown
from writehead.paper.results import read_results, result_path
from writehead.paper.sheets import MEASURES, Sheet
from writehead.paper.tables import TABLE_1, TABLE_2, TABLE_3

ROOT = Path(__file__).parents[2]
TEMPLATES = {
    table: json.loads((ROOT / "results" / table / place).read_text(encoding="utf-8"))
    for table, place in (
        ("table1", "small/multi-query-seed0.json"),
        ("table2", "paper/multi-query.json"),
        ("table3", "small/multi-query-seed0.json"),
    )
}
WORSE = "worse than multi-head"
CLOSER = "less than half as far from multi-head as the best of fewer or smaller heads"
BETTER = "better than the best of fewer or smaller heads"
HIGHEST = "higher than the best of all other rows"


@pytest.fixture
def no_pictures(monkeypatch) -> None:
    for name in ("quality_svg", "loss_svg"):
        monkeypatch.setattr(f"writehead.paper.report.{name}", lambda sheet: "<svg></svg>")


def write(path: Path, result: dict[str, object]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result), encoding="utf-8")
    return path


def write_row(folder: Path, table: str, row: str, losses, *, scale="small", **changes) -> Path:
    """One row with a seed per loss, from which all its figures follow: a lower one is better."""
    experiment, place = EXPERIMENTS[table, scale], changes.pop("place", scale)
    for seed, loss in enumerate(losses):
        result = copy.deepcopy(TEMPLATES[table])
        result |= {"scale": scale, "family": experiment.family, "row": row, "seed": seed}
        result["model"] = {**experiment.rows[row].to_json(), "vocab_size": 16384}
        result["train"] = {**experiment.train.to_json(), "seed": seed}
        result["log"] = [{"step": i, "dev_ln_ppl": loss} for i in range(500, 6001, 500)]
        for number, part in enumerate(result["scores"].values()):
            part |= {"ln_ppl": loss, "ppl_per_word": 100 * (number + 1) * loss}
            for i, bleu in enumerate(part.get("bleu", {}).values()):
                score = 40.0 - 10.0 * loss + number + i
                bleu |= {"intl": score, "13a": score - 0.2}
        path = write(result_path(folder, table, place, row, seed), result | changes)
    return path


def write_table(folder: Path, table: str, losses: dict[str, list[float]]) -> Path:
    """Rows of the small scale, by the paper's names."""
    paper = TABLE_1 if table == "table1" else TABLE_3
    names = dict(zip((row.row for row in paper), EXPERIMENTS[table, "small"].rows, strict=True))
    for row, values in losses.items():
        write_row(folder, table, names[row], values)
    return folder


def as_in_the_paper(noise: float = 0.001) -> dict[str, list[float]]:
    """The paper's ln(PPL), with three seeds of the first two rows."""
    losses = {row.row: [row.ln_ppl_dev] for row in TABLE_1}
    for row in ("multi-head", "multi-query"):
        losses[row] = [losses[row][0] + shift for shift in (-noise, 0.0, noise)]
    return losses


def verdicts(folder: Path, table: str = "table1") -> dict[tuple[str, str], str]:
    sheet = Sheet(table, "small", read_results(folder)[table, "small"])
    return {(one.claim.reading, one.measure.key): one.word for one in judge(sheet)}


def text_of(folder: Path) -> str:
    return markdown(make_report(folder), "figures")


def cells(text: str) -> list[list[str]]:
    """The rows of all tables in Markdown."""
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line] for line in lines]


def test_every_claim_holds_in_the_papers_own_tables():
    held = 0
    for table in ("table1", "table3"):
        result = {"row": "multi-head", "seed": 0, "model": {"vocab_size": 16384}, "scores": {}}
        for verdict in judge(Sheet(table, "small", [result])):
            assert verdict.word == "not run"
            if verdict.measure.in_paper:
                assert verdict.paper.margin > 1e-9, verdict.claim.words
                held += 1
    assert held == 13
    for claim in CLAIMS:
        assert set(claim.measures) <= {measure.key for measure in MEASURES[claim.table]}


def test_claims_follow_the_figures(tmp_path):
    def found(name, noise=0.001, **changes):
        changed = {row.replace("_", "-"): values for row, values in changes.items()}
        return verdicts(write_table(tmp_path / name, "table1", as_in_the_paper(noise) | changed))

    as_is = found("as")
    assert as_is[WORSE, "ln_ppl_dev"] == as_is[CLOSER, "ln_ppl_dev"] == "seen"
    assert as_is[HIGHEST, "bleu_test_beam4"] == "not seen"  # these BLEU scores follow ln(PPL)
    paper = as_in_the_paper()
    head, query = paper["multi-head"], paper["multi-query"]
    turned = found("turned", multi_head=query, multi_query=head, multi_head_local=[1.437])
    assert turned[WORSE, "ln_ppl_dev"] == turned[WORSE, "bleu_dev"] == "not seen"
    assert turned[HIGHEST, "bleu_test_beam4"] == "seen"
    far = found("far", multi_query=[1.470, 1.471, 1.472])
    assert (far[WORSE, "ln_ppl_dev"], far[CLOSER, "ln_ppl_dev"]) == ("seen", "not seen")
    assert set(found("noisy", noise=0.05).values()) == {"within noise"}


def test_the_noise_is_students_t_times_the_pooled_deviation(tmp_path):
    losses = {"multi-head": [1.40, 1.42, 1.44], "multi-query": [1.50, 1.54]}
    write_table(tmp_path, "table1", as_in_the_paper() | losses)
    first = judge(Sheet("table1", "small", read_results(tmp_path)["table1", "small"]))[0]
    # squares about the means: 2 × 0.02² and 2 × 0.02², over 2 + 1 degrees of freedom; t(3) = 3.18
    pooled = (4 * 0.02**2 / 3) ** 0.5
    assert first.claim.reading == WORSE
    assert first.ours.margin == pytest.approx(1.52 - 1.42)
    assert first.noise == pytest.approx(3.18 * pooled * (1 / 3 + 1 / 2) ** 0.5)


def test_the_tables_have_the_papers_figures_beside_ours_and_say_what_was_not_run(tmp_path):
    losses = as_in_the_paper()
    for row in ("multi-head-local", "multi-query-local"):
        del losses[row]
    text = text_of(write_table(tmp_path, "table1", losses))
    table = cells(text.partition("#### ")[0])
    assert table[2] == [
        *("multi-head", "8", "64 (128)", "2048 (4096)", "1.424 ± 0.001", "1.424"),
        *("25.76 ± 0.01", "26.7", "26.76 ± 0.01 / 27.76 ± 0.01", "27.7 / 28.4"),
        *("26.56 ± 0.01 / 27.56 ± 0.01", "3"),
    ]
    assert table[6][:6] == ["multi-head", "1", "64 (128)", "3392 (6784)", "1.518", "1.518"]
    assert [row[4] for row in table[4:6]] == ["not run"] * 2
    assert [row[5] for row in table[2:]] == [f"{row.ln_ppl_dev:.3f}" for row in TABLE_1]
    assert re.search(r"\nNot run: Table 2.*; Table 3.*\n$", text)
    found, claims = verdicts(tmp_path), cells(text.partition("#### ")[2])[2:]
    left = [key for key, word in found.items() if word == "not run"]
    assert f"Not run: {len(left)} of {len(found)}" in text
    assert len(claims) + len(left) == len(found)
    train, made = TEMPLATES["table1"]["train"], TEMPLATES["table1"]["environment"]
    tokens = train["rows"] * train["target_length"]
    for words in (f"{train['steps']:,} steps of {tokens:,} tokens", made["commit"], "tok:intl"):
        assert words in text


def test_table_3_has_perplexities_per_word(tmp_path):
    losses = {row.row: [row.ppl_dev / 100] for row in TABLE_3}
    losses["multi-head"] = [losses["multi-head"][0] + shift for shift in (0.0, 1e-4, 0.0)]
    table = cells(text_of(write_table(tmp_path, "table3", losses)).partition("#### ")[0])
    assert table[3] == [
        *("multi-query", "8", "64 (128)", "4544 (9088)", "30.20", "30.2", "60.40", "1")
    ]
    assert set(verdicts(tmp_path, "table3").values()) == {"seen"}
    write_table(tmp_path, "table3", {"multi-head-8x16": [0.301]})
    assert verdicts(tmp_path, "table3")[BETTER, "ppl_dev"] == "not seen"


def test_table_2_has_times_shares_of_the_floor_and_gains(tmp_path):
    for row, slow in (("multi-head", 2.0), ("multi-query", 0.5)):
        result = copy.deepcopy(TEMPLATES["table2"]) | {"row": row}
        result["training"]["us_per_token"] = 2.9
        for one in result["decode"]:
            for label, part in (("ours, padded", 1), ("ours, true lengths", 2)):
                us = slow * one["setting"]["beam"] / part
                one["measured"][label] |= {
                    "us_per_token": {"encoder": 0.25, "decoder": us},
                    "share_of_floor": 0.5,
                }
        write(result_path(tmp_path, "table2", "paper", row), result)
    table = cells(text_of(tmp_path))
    assert table[2] == [
        *("multi-head", "2.9", "13.2", "0.25 + 2 (50%)", "0.25 + 1 (50%)", "1.7 + 46"),
        *("0.25 + 8 (50%)", "0.25 + 4 (50%)", "2.0 + 203"),
    ]
    assert table[4][:4] == ["multi-head local", "not run", "13.2", "not run"]
    assert table[6] == [
        *("gain of multi-query", "1.00×", "1.02×", "4.0×", "4.0×", "12.1×", "4.0×", "4.0×", "6.3×")
    ]
    assert len(table) == 2 + len(TABLE_2) + 2


def test_the_scale_with_the_most_rows_comes_first_and_a_rehearsal_only_if_alone(
    tmp_path, no_pictures
):
    def scales():
        titles = [one.table.title for one in make_report(tmp_path).sections]
        return [title.rpartition(": ")[2] for title in titles]

    write_row(tmp_path, "table1", "multi-query", [1.5], scale="tiny")
    write_row(tmp_path, "table3", "multi-query", [1.5], scale="tiny")
    assert scales() == ["tiny", "tiny"]
    write_table(tmp_path, "table1", as_in_the_paper())
    write_row(tmp_path, "table1", "multi-query", [1.5, 1.4], scale="paper-size")
    write_row(tmp_path, "table1", "multi-head", [1.4], scale="paper")
    assert scales() == ["small", "paper", "paper-size", "tiny"]


def test_repeats_are_compared_with_the_noise(tmp_path, no_pictures):
    def repeated(loss, table="table1"):
        write_row(tmp_path / "again", table, "multi-query", [loss])
        found = (row for row in cells(text_of(tmp_path)) if row[:2] == ["multi-query", "0"])
        return {row[2]: row[3:] for row in found}

    write_table(tmp_path, "table3", {"multi-query": [3.0]})
    found = repeated(3.5, "table3")["perplexity dev"]
    assert found == ["300.00", "350.00", "+50.00", "–", "**not known**"]
    write_table(tmp_path, "table1", as_in_the_paper(noise=0.01))
    # two runs differ by less than t(4) x 0.01 x sqrt(2) in 19 cases of 20
    near = ["1.429", "1.431", "+0.002", "± 0.039", "**within the noise**"]
    assert repeated(1.439 - 0.01 + 0.002)["ln(PPL) dev"] == near
    found = repeated(1.439 - 0.01 + 0.05)
    assert found["ln(PPL) dev"][2:] == ["+0.050", "± 0.039", "**outside the noise**"]
    assert found["BLEU dev"][2:] == ["−0.50", "± 0.39", "**outside the noise**"]


def test_the_mean_gap_is_over_common_seeds(tmp_path):
    losses = {"multi-head": [1.40, 1.42], "multi-query": [1.44, 1.44, 9.9]}
    text = text_of(write_table(tmp_path, "table1", losses))
    assert "+0.030 after 6,000 steps, the mean of 2 seeds" in text


def readme(folder: Path) -> Path:
    path = folder / "README.md"
    path.write_text(f"# Ours\n\n{BEGIN}\nwhat was there\n{END}\nafter\n", encoding="utf-8")
    return path


def test_the_readme_is_filled_between_its_markers_and_checked(writehead, tmp_path):
    results = write_table(tmp_path / "results", "table1", as_in_the_paper())
    for name, day in (("old", 1), ("new", 2)):  # the newest sweep over contexts is drawn
        sweep = json.loads((ROOT / "results/decoding/decode-sweeps.json").read_text())
        sweep["environment"]["date"] = f"2026-01-0{day}"
        write(results / f"{name}.json", sweep)
    path, output = readme(tmp_path), tmp_path / "docs" / "report"
    before = path.read_text(encoding="utf-8")
    command = ("report", f"--results={results}", f"--readme={path}", f"--output={output}")
    code, _, err = writehead(*command, "--check")
    assert (code, f"{path} " in err, output.exists()) == (1, True, False)
    assert path.read_text(encoding="utf-8") == before

    assert writehead(*command)[0] == 0
    text = path.read_text(encoding="utf-8")
    assert re.fullmatch(rf"# Ours\n\n{BEGIN}\n## .*{END}\nafter\n", text, re.DOTALL)
    assert "what was there" not in text
    links = re.findall(r"\]\((docs/report/[^)]+)\)", text)
    drawn = [(tmp_path / link).read_bytes() for link in links]
    assert (len(drawn), any(b"2026-01-02" in one for one in drawn)) == (3, True)
    assert (output / "report.html").read_text(encoding="utf-8").count("<svg") == 3

    assert writehead(*command)[0] == 0  # which changes nothing
    assert path.read_text(encoding="utf-8") == text
    assert [(tmp_path / link).read_bytes() for link in links] == drawn
    assert writehead(*command, "--check") == (0, "", "")


def test_only_a_report_of_the_projects_own_results_fills_its_readme(
    writehead, tmp_path, monkeypatch, no_pictures
):
    project = tmp_path / "project"
    for name in ("results", "mine"):
        write_table(project / name, "table1", {"multi-head": [1.4]})
    before = readme(project).read_text(encoding="utf-8")
    monkeypatch.chdir(project)
    assert writehead("report", "--results=mine", "--output=mine/report")[0] == 0
    assert writehead("report", "--results=mine", "--check")[0] == 2  # there is nothing to check
    code, _, err = writehead("report", "--output=../elsewhere")
    assert (code, "README.md is left alone" in err) == (0, True)
    assert (project / "README.md").read_text(encoding="utf-8") == before
    assert writehead("report", "--output=../elsewhere", "--check")[0] == 1
    assert writehead("report")[0] == 0
    assert (project / "README.md").read_text(encoding="utf-8") != before
    assert writehead("report", "--check") == (0, "", "")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scale": "paper", "place": "small"}, "wrong folder"),
        ({"train": {**EXPERIMENTS["table1", "small"].train.to_json(), "steps": 5}}, "steps is 5"),
        ("another dataset", "dataset is another"),
        ({"format": 7}, "not written by `writehead reproduce`"),
        ('{"format": 1}', "lacks table"),
        ("again", "no first result"),
    ],
)
def test_results_that_do_not_fit_together_are_refused(tmp_path, changes, words):
    write_row(tmp_path, "table1", "multi-head", [1.4])
    given = changes if isinstance(changes, dict) else {}
    path = write_row(tmp_path, "table1", "multi-query", [1.5], **given)
    if changes == "again":
        write_row(tmp_path / "again", "table1", "multi-query-local", [1.4])
    elif changes == "another dataset":
        result = json.loads(path.read_text())
        path.write_text(json.dumps(result | {"data": result["data"] | {"fingerprint": "other"}}))
    elif isinstance(changes, str):
        path.write_text(changes)
    with pytest.raises(RunError, match=words):
        make_report(tmp_path)


def test_a_missing_folder_file_or_marker_is_named(writehead, tmp_path, monkeypatch, no_pictures):
    monkeypatch.chdir(tmp_path)
    write_row(tmp_path / "results", "table1", "multi-head", [1.4])
    (tmp_path / "empty").mkdir()
    (tmp_path / "bare.md").write_text("nothing\n")
    for option, words in (
        ("--results=nowhere", "nowhere"),
        ("--results=empty", "no result in empty"),
        ("--check", "no README.md"),
        ("--readme=none.md", "none.md"),
        ("--readme=bare.md", BEGIN),
    ):
        code, out, err = writehead("report", option)
        assert (code, out, words in err) == (2, "", True), err
    assert not (tmp_path / "docs").exists()


def test_our_own_readme_says_what_our_own_results_give(writehead, monkeypatch, no_pictures):
    monkeypatch.chdir(ROOT)
    assert writehead("report", "--check") == (0, "", "")
