"""The report says what result files say: made-up ones here, whose figures the tests choose."""

import json
import re
from pathlib import Path

import pytest

from writehead.errors import RunError
from writehead.paper.claims import CLAIMS, judge
from writehead.paper.experiments import EXPERIMENTS
from writehead.paper.frame import STYLE
from writehead.paper.presets import rows
from writehead.paper.report import BEGIN, END, make_report, markdown
from writehead.paper.results import read_results, result_path
from writehead.paper.sheets import MEASURES, Sheet, kv_bytes
from writehead.paper.tables import TABLE_1, TABLE_2, TABLE_3

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    "hardware": {"device": "a chip", "cores": 2, "threads": 1},
    "versions": {"writehead": "0.1.0", "torch": "2.99"},
    "commit": "0123456789abcdef+",
    "date": "2026-01-02T03:04:05+00:00",
    "command": "writehead reproduce",
}
DATA = {
    "task": "translation",
    "vocabulary": 16384,
    "tokenizer": "f00",
    "config": {},
    "sources": [{"split": "train", "files": [{"name": "some.en.xz"}, {"name": "some.de.xz"}]}],
    "splits": {"train": {"sequences": 1_234_567, "target_tokens": 39_000_000}},
    "dropped": {},
    "fingerprint": "abc",
}
SMALL = {table: list(EXPERIMENTS[table, "small"].rows) for table in ("table1", "table3")}


def bleu(score: float) -> dict[str, object]:
    signature = "nrefs:1|case:mixed|eff:no|tok:intl|smooth:exp|version:2.6.0"
    return {"intl": score, "intl_signature": signature, "13a": score - 0.2}


def scores(table: str, loss: float) -> dict[str, object]:
    """All figures of a row from one: a better row is better by all of them."""
    if table == "table3":
        return {
            "dev": {"name": "books", "words": 1000, "ln_ppl": loss, "ppl_per_word": 100 * loss},
            "other": {"name": "news", "words": 500, "ln_ppl": loss, "ppl_per_word": 200 * loss},
        }
    score = 40.0 - 10.0 * loss
    return {
        "dev": {
            "name": "newstest2013",
            "sentences": 3000,
            "ln_ppl": loss,
            "bleu": {"greedy": bleu(score)},
        },
        "test": {
            "name": "newstest2014",
            "sentences": 3003,
            "ln_ppl": loss,
            "bleu": {"greedy": bleu(score + 1), "beam-4": bleu(score + 2)},
        },
    }


def write_row(
    folder: Path,
    table: str,
    row: str,
    losses: list[float],
    *,
    scale: str = "small",
    place: str | None = None,
    **changes: object,
) -> list[Path]:
    """The files of one row, a seed for each loss, among those of its scale or, wrongly, `place`."""
    experiment = EXPERIMENTS[table, scale]
    paths = []
    for seed, loss in enumerate(losses):
        result = {
            "format": 1,
            "table": table,
            "scale": experiment.scale,
            "family": experiment.family,
            "row": row,
            "seed": seed,
            "model": {**experiment.rows[row].to_json(), "vocabulary": DATA["vocabulary"]},
            "parameters": 52_700_000,
            "train": {**experiment.train.to_json(), "seed": seed},
            "data": DATA,
            "scores": scores(table, loss),
            "log": [{"step": i, "dev_ln_ppl": loss + 1000 / i} for i in range(500, 6001, 500)],
            "timings": {"training_s": 240.0, "scoring_s": 20.0},
            "environment": ENVIRONMENT,
            **changes,
        }
        path = result_path(folder, table, place or scale, row, seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result))
        paths.append(path)
    return paths


def write_table(folder: Path, table: str, losses: dict[str, list[float]]) -> Path:
    """A table of the paper's order; rows are named by the paper's and written by ours."""
    paper = TABLE_1 if table == "table1" else TABLE_3
    names = dict(zip((row.row for row in paper), SMALL[table], strict=True))
    for row, values in losses.items():
        write_row(folder, table, names[row], values)
    return folder


def as_in_the_paper(noise: float = 0.001) -> dict[str, list[float]]:
    """ln(PPL) as the paper's, with three seeds of the first two rows."""
    losses = {row.row: [row.ln_ppl_dev] for row in TABLE_1}
    for row in ("multi-head", "multi-query"):
        middle = losses[row][0]
        losses[row] = [middle - noise, middle, middle + noise]
    return losses


def verdicts(folder: Path, table: str = "table1") -> dict[tuple[str, str], str]:
    """What became of each claim, by what it is held to and its figure."""
    sheet = Sheet(table, "small", read_results(folder)[table, "small"])
    return {(one.claim.reading, one.measure.key): one.word for one in judge(sheet)}


def cells(text: str) -> list[list[str]]:
    """The rows of all tables in Markdown."""
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]


WORSE = "worse than multi-head"
CLOSER = "less than half as far from multi-head as the best of fewer or smaller heads"
BETTER = "better than the best of fewer or smaller heads"
HIGHEST = "higher than the best of all other rows"


def test_repeats_stand_beside_what_they_repeat_and_are_held_to_the_noise(tmp_path):
    write_table(tmp_path, "table1", as_in_the_paper(noise=0.01))
    write_row(tmp_path / "again", "table1", "multi-query", [1.439 - 0.01 + 0.002])
    text = markdown(make_report(tmp_path), "figures")
    found = {row[2]: row[3:] for row in cells(text) if row[0] == "multi-query" and row[1] == "0"}
    # two runs differ by less than t(4) x 0.01 x sqrt(2) in 19 cases of 20
    near = ["1.429", "1.431", "+0.002", "± 0.039", "**within the noise**"]
    assert found["ln(PPL) dev"] == near
    write_row(tmp_path / "again", "table1", "multi-query", [1.439 - 0.01 + 0.05])
    text = markdown(make_report(tmp_path), "figures")
    found = {row[2]: row[3:] for row in cells(text) if row[0] == "multi-query" and row[1] == "0"}
    assert found["ln(PPL) dev"][2:] == ["+0.050", "± 0.039", "**outside the noise**"]
    assert found["BLEU dev"][2:] == ["−0.50", "± 0.39", "**outside the noise**"]


def test_a_repeat_of_one_seed_has_no_noise_to_be_held_to(tmp_path):
    write_table(tmp_path, "table3", {"multi-query": [3.0]})
    write_row(tmp_path / "again", "table3", "multi-query", [3.5])
    text = markdown(make_report(tmp_path), "figures")
    assert ["300.00", "350.00", "+50.00", "–", "**not known**"] in [r[3:] for r in cells(text)]


@pytest.mark.parametrize(
    ("row", "changes", "words"),
    [
        ("multi-head", {}, "no first result of it"),
        ("multi-query", {"data": {**DATA, "fingerprint": "other"}}, "its dataset is another"),
    ],
)
def test_a_repeat_of_something_else_is_refused(tmp_path, row, changes, words):
    write_table(tmp_path, "table1", {"multi-query": [1.4]})
    write_row(tmp_path / "again", "table1", row, [1.4], **changes)
    with pytest.raises(RunError, match=words):
        make_report(tmp_path)


def test_every_claim_holds_in_the_papers_own_tables():
    held = 0
    for table in ("table1", "table3"):
        result = {"row": "multi-head", "seed": 0, "model": {"vocabulary": 16384}, "scores": {}}
        for verdict in judge(Sheet(table, "small", [result])):
            assert verdict.word == "not run"
            if verdict.measure.in_paper:
                assert verdict.paper.margin > 1e-9, verdict.claim.words
                held += 1
    assert held == 13
    assert {claim.table for claim in CLAIMS} == {"table1", "table3"}


def test_the_tables_have_the_papers_figures_beside_ours(tmp_path):
    write_table(tmp_path, "table1", as_in_the_paper())
    text = markdown(make_report(tmp_path), "figures")
    table = cells(text.partition("#### ")[0])
    assert table[0] == [
        *("attention", "h", "k, v", "d_ff", "ln(PPL) dev", "paper", "BLEU dev", "paper"),
        *("BLEU test, beam 1 / 4", "paper", "BLEU test, 13a", "seeds"),
    ]
    assert table[2] == [
        *("multi-head", "8", "64 (128)", "2048 (4096)", "1.424 ± 0.001", "1.424"),
        *("25.76 ± 0.01", "26.7", "26.76 ± 0.01 / 27.76 ± 0.01", "27.7 / 28.4"),
        *("26.56 ± 0.01 / 27.56 ± 0.01", "3"),
    ]
    one = table[2 + 4]
    assert one[:6] == ["multi-head", "1", "64 (128)", "3392 (6784)", "1.518", "1.518"]
    assert one[-3:] == ["–", "25.62 / 26.62", "1"]
    assert len(table) == 2 + len(TABLE_1)


def test_the_caption_says_what_differs_from_the_paper(tmp_path):
    write_table(tmp_path, "table1", as_in_the_paper())
    text = markdown(make_report(tmp_path), "figures")
    for words in (
        "52.7M parameters in every row (the paper: 211M)",
        "1,234,567 pairs, 39M target tokens, of some.en.xz, some.de.xz; a vocabulary of 16,384",
        "6,000 steps of 16,384 tokens, about 2.4 epochs",
        "(the paper: 100,000 steps of 32,768 tokens, about 20 epochs)",
        "Chip: a chip, 4 min from a row's first step to its last, whether or not others shared",
        "newstest2014, 3,003 (the paper: `sacrebleu -t wmt13`, `sacrebleu -t wmt14`)",
        "tok:intl",
        "commit 0123456789+.",
    ):
        assert words in text


def test_rows_that_were_not_run_say_so_and_so_do_tables(tmp_path):
    write_table(tmp_path, "table1", {"multi-head": [1.4], "multi-query": [1.5]})
    text = markdown(make_report(tmp_path), "figures")
    table = cells(text.partition("#### ")[0])
    assert [row[4] for row in table[2:]] == ["1.400", "1.500", *["not run"] * 6]
    assert [row[5] for row in table[2:]] == [f"{row.ln_ppl_dev:.3f}" for row in TABLE_1]
    assert "One seed a row, so the noise is not known." in text
    not_run = "Table 2, microseconds a token; Table 3, language models; the model in the box"
    assert text.endswith(f"\nNot run: {not_run}.\n")
    found = verdicts(tmp_path)
    assert found[WORSE, "ln_ppl_dev"] == "not known"
    assert found[CLOSER, "ln_ppl_dev"] == "not run"
    claims = cells(text.partition("#### ")[2])[2:]
    assert {row[-1] for row in claims} == {"**not known**"}
    left = len(found) - len(claims)
    assert left > 0
    assert f"Not run: {left} of {len(found)}, about rows that were not." in text


def test_the_scale_with_the_most_rows_comes_first_and_of_equals_the_larger(tmp_path):
    write_table(tmp_path, "table1", as_in_the_paper())
    write_row(tmp_path, "table1", "multi-query", [1.5, 1.4], scale="paper-size")
    write_row(tmp_path, "table1", "multi-head", [1.4], scale="paper")
    sections = make_report(tmp_path).sections
    bracketed = ["In brackets: the paper's sizes." in one.table.notes for one in sections]
    assert bracketed == [True, False, False]  # the others' are the paper's
    titles = [one.table.title for one in sections]
    assert [title.rpartition(": ")[2] for title in titles] == ["small", "paper", "paper-size"]


def test_a_rehearsal_is_shown_only_where_there_is_nothing_else_of_a_table(tmp_path):
    write_row(tmp_path, "table1", "multi-query", [1.5], scale="tiny")
    write_row(tmp_path, "table3", "multi-query", [1.5], scale="tiny")
    assert len(make_report(tmp_path).sections) == 2
    write_row(tmp_path, "table1", "multi-query", [1.5])
    titles = [one.table.title.rpartition(": ")[2] for one in make_report(tmp_path).sections]
    assert titles == ["small", "tiny"]


def test_claims_flip_when_the_figures_flip(tmp_path):
    found = verdicts(write_table(tmp_path / "as", "table1", as_in_the_paper()))
    assert found[WORSE, "ln_ppl_dev"] == found[CLOSER, "ln_ppl_dev"] == "seen"
    assert found[HIGHEST, "bleu_test_beam4"] == "not seen"  # made-up BLEU follows ln(PPL)

    turned = as_in_the_paper()
    turned["multi-head"], turned["multi-query"] = turned["multi-query"], turned["multi-head"]
    turned["multi-head-local"] = [1.437]
    found = verdicts(write_table(tmp_path / "turned", "table1", turned))
    assert found[WORSE, "ln_ppl_dev"] == found[WORSE, "bleu_dev"] == "not seen"
    assert found[HIGHEST, "bleu_test_beam4"] == "seen"

    far = as_in_the_paper()
    far["multi-query"] = [1.470, 1.471, 1.472]
    found = verdicts(write_table(tmp_path / "far", "table1", far))
    assert found[WORSE, "ln_ppl_dev"] == "seen"
    assert found[CLOSER, "ln_ppl_dev"] == "not seen"


def test_a_difference_that_seeds_make_too_is_within_noise(tmp_path):
    found = verdicts(write_table(tmp_path, "table1", as_in_the_paper(noise=0.05)))
    assert set(found.values()) == {"within noise"}


def test_the_noise_is_students_t_times_the_pooled_deviation(tmp_path):
    losses = as_in_the_paper()
    losses["multi-head"], losses["multi-query"] = [1.40, 1.42, 1.44], [1.50, 1.54]
    write_table(tmp_path, "table1", losses)
    sheet = Sheet("table1", "small", read_results(tmp_path)["table1", "small"])
    first = judge(sheet)[0]
    # squares about the means: 2 × 0.02² and 2 × 0.02², over 2 + 1 degrees of freedom; t(3) = 3.18
    pooled = (4 * 0.02**2 / 3) ** 0.5
    assert first.claim.reading == WORSE
    assert first.ours.margin == pytest.approx(1.52 - 1.42)
    assert first.noise == pytest.approx(3.18 * pooled * (1 / 3 + 1 / 2) ** 0.5)


def test_table_3_is_per_word_with_other_text_beside_and_has_its_claims(tmp_path):
    losses = {row.row: [row.ppl_dev / 100] for row in TABLE_3}
    losses["multi-head"] *= 3
    losses["multi-head"][1] += 1e-4
    write_table(tmp_path, "table3", losses)
    text = markdown(make_report(tmp_path), "figures")
    table = cells(text.partition("#### ")[0])
    assert table[0][4:] == ["perplexity dev", "paper", "perplexity, other text", "seeds"]
    assert table[3] == [
        *("multi-query", "8", "64 (128)", "4544 (9088)", "30.20", "30.2", "60.40", "1")
    ]
    assert set(verdicts(tmp_path, "table3").values()) == {"seen"}
    losses["multi-head-8x16"] = [0.301]
    write_table(tmp_path, "table3", losses)
    assert verdicts(tmp_path, "table3")[BETTER, "ppl_dev"] == "not seen"


def test_quality_is_drawn_against_the_bytes_that_a_token_keeps():
    # 6 layers of K and V in 16 bits, all heads or one; a window of 32 of 128 target tokens
    models = rows("wmt14")
    assert kv_bytes(models["multi-head"]) == 6 * 2 * 8 * 128 * 2
    assert kv_bytes(models["multi-query"]) == 6 * 2 * 128 * 2
    assert kv_bytes(models["multi-head-local"]) == 6 * 2 * 8 * 128 * 2 * (128 + 32) / 256
    assert kv_bytes(rows("lm1b")["multi-head-4x32"]) == 6 * 2 * 128 * 2


def speed_result(row: str, slow: float) -> dict[str, object]:
    def measured(us: float) -> dict[str, object]:
        return {
            "step_ms": {"median": us},
            "us_per_token": {"encoder": 0.25, "decoder": us},
            "share_of_floor": 0.5,
        }

    return {
        "format": 1,
        "table": "table2",
        "scale": "paper",
        "family": "wmt14",
        "row": row,
        "model": {},
        "dtype": "bfloat16",
        "chip": {},
        "decode": [
            {
                "setting": {"beam": beam, "batch": 1024, "source": 128, "target": 128},
                "measured": {
                    "ours, padded": measured(slow * beam),
                    "ours, true lengths": measured(slow * beam / 2),
                },
            }
            for beam in (1, 4)
        ],
        "training": {
            "us_per_token": 2.9,
            "dataset": "grammar",
            "train": {"rows": 128, "target_length": 256},
        },
        "environment": ENVIRONMENT,
    }


def test_table_2_has_times_shares_of_the_floor_and_gains(tmp_path):
    for row, slow in (("multi-head", 2.0), ("multi-query", 0.5)):
        path = result_path(tmp_path, "table2", "paper", row)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(speed_result(row, slow)))
    text = markdown(make_report(tmp_path), "figures")
    table = cells(text)
    assert table[2] == [
        *("multi-head", "2.9", "13.2", "0.25 + 2 (50%)", "0.25 + 1 (50%)", "1.7 + 46"),
        *("0.25 + 8 (50%)", "0.25 + 4 (50%)", "2.0 + 203"),
    ]
    assert table[4][:4] == ["multi-head local", "not run", "13.2", "not run"]
    assert table[6] == [
        *("gain of multi-query", "1.00×", "1.02×", "4.0×", "4.0×", "12.1×", "4.0×", "4.0×", "6.3×")
    ]
    assert table[7][5] == "7.0×"
    assert len(table) == 2 + len(TABLE_2) + 2
    assert "a chip (the paper: 211M parameters, batch 1,024, 128 + 128 tokens, one TPUv2" in text


def readme(folder: Path) -> Path:
    path = folder / "README.md"
    path.write_text(
        f"# Ours\n\nbefore\n\n{BEGIN}\nwhat was there\n{END}\nafter\n", encoding="utf-8"
    )
    return path


def test_readme_is_filled_between_its_markers_exactly_and_once(writehead, tmp_path):
    write_table(tmp_path / "results", "table1", as_in_the_paper())
    path = readme(tmp_path)
    command = ("report", f"--results={tmp_path / 'results'}", f"--readme={path}")
    command = (*command, f"--output={tmp_path / 'docs' / 'report'}")
    assert writehead(*command, "--check")[0] == 1
    code, out, err = writehead(*command)
    assert (code, out) == (0, f"report: {tmp_path / 'docs' / 'report' / 'report.html'}\n")
    assert "brought up to date" in err
    text = path.read_text(encoding="utf-8")
    assert text.startswith(f"# Ours\n\nbefore\n\n{BEGIN}\n## The paper's tables\n")
    assert text.endswith(f"{END}\nafter\n")
    assert "what was there" not in text
    links = re.findall(r"\]\((docs/report/[^)]+)\)", text)
    assert len(links) == 2
    for link in links:
        assert (tmp_path / link).read_text(encoding="utf-8").count("<svg") == 1

    drawn = {link: (tmp_path / link).read_bytes() for link in links}
    code, _, err = writehead(*command)
    assert (code, err) == (0, "")
    assert path.read_text(encoding="utf-8") == text
    assert {link: (tmp_path / link).read_bytes() for link in links} == drawn
    assert writehead(*command, "--check") == (0, "", "")


def test_results_of_somebodys_own_leave_readme_and_card_alone(writehead, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    card = tmp_path / "src" / "writehead" / "boxed" / "MODEL_CARD.md"
    card.parent.mkdir(parents=True)
    card.write_text("figures")
    write_table(tmp_path / "mine", "table1", as_in_the_paper())
    before = readme(tmp_path).read_text(encoding="utf-8")
    command = ("report", "--results=mine", "--output=mine/report")
    assert writehead(*command) == (0, "report: mine/report/report.html\n", "")
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == before
    assert "no README.md here to check" in writehead(*command, "--check")[2]
    code, _, err = writehead(*command, "--readme=README.md")
    assert (code, err) == (0, "README.md: brought up to date\n")
    assert card.read_text() == "figures"


def test_a_report_that_is_made_elsewhere_leaves_readme_alone(writehead, tmp_path, monkeypatch):
    project = tmp_path / "project"
    write_table(project / "results", "table1", as_in_the_paper())
    before = readme(project).read_text(encoding="utf-8")
    monkeypatch.chdir(project)
    page = "report: ../elsewhere/report.html\n"
    alone = "README.md is left alone, since the report is made elsewhere\n"
    assert writehead("report", "--output=../elsewhere") == (0, page, alone)
    assert (project / "README.md").read_text(encoding="utf-8") == before
    assert writehead("report", "--output=../elsewhere", "--check")[0] == 1
    (project / "docs").mkdir()
    (project / "docs" / "report").symlink_to(tmp_path / "elsewhere")
    assert writehead("report")[2] == "README.md: brought up to date\n"
    assert writehead("report", "--output=../elsewhere", "--check")[0] == 1  # where links differ
    assert writehead("report", "--check") == (0, "", "")


def test_check_says_in_a_sentence_that_readme_is_behind_and_writes_nothing(writehead, tmp_path):
    write_table(tmp_path / "results", "table1", as_in_the_paper())
    path = readme(tmp_path)
    before = path.read_text(encoding="utf-8")
    command = ("report", f"--results={tmp_path / 'results'}", f"--readme={path}", "--check")
    code, out, err = writehead(*command, f"--output={tmp_path / 'pictures'}")
    assert (code, out) == (1, "")
    assert err == f"{path} does not say what {tmp_path / 'results'} gives; run writehead report\n"
    assert path.read_text(encoding="utf-8") == before
    assert not (tmp_path / "pictures").exists()


def test_the_page_needs_nothing_else_and_marks_the_verdicts(writehead, tmp_path):
    write_table(tmp_path / "results", "table1", as_in_the_paper())
    path, output = readme(tmp_path), tmp_path / "out"
    writehead(
        "report", f"--results={tmp_path / 'results'}", f"--output={output}", f"--readme={path}"
    )
    page = (output / "report.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 2
    assert STYLE in page
    assert not re.search(r"(src|href)=[\"']?https?:", page)
    assert "<td class=seen>seen</td>" in page
    assert "<td class=paper>27.5 / 28.5</td>" in page


def test_the_newest_sweep_over_contexts_is_drawn_too(writehead, tmp_path):
    results = write_table(tmp_path / "results", "table1", as_in_the_paper())
    for name, day in (("old", 1), ("new", 2)):
        sweep = {
            "preset": "lm1b/multi-query",
            "kind": "multi-query",
            "model": {"task": "language"},
            "batch": 16,
            "context": 128,
            "floor": {"step_ms": 1.0},
            "measured": {"ours": {"step_ms": {"median": 2.0}}},
        }
        bench = {
            "bench": "decode",
            "dtype": "bfloat16",
            "environment": {**ENVIRONMENT, "date": f"2026-01-0{day}"},
            "sweeps": {"context": [sweep, {**sweep, "context": 256}]},
        }
        (results / f"{name}.json").write_text(json.dumps(bench))
    path, output = readme(tmp_path), tmp_path / "out"
    writehead("report", f"--results={results}", f"--output={output}", f"--readme={path}")
    assert "2026-01-02" in (output / "decode-context.svg").read_text(encoding="utf-8")
    assert "(out/decode-context.svg)" in path.read_text(encoding="utf-8")
    assert (output / "report.html").read_text(encoding="utf-8").count("<svg") == 3


def spoil(folder: Path, how: str) -> None:
    """A folder of results with one thing wrong."""
    write_row(folder, "table1", "multi-head", [1.4])
    (path,) = write_row(folder, "table1", "multi-query", [1.5])
    result = json.loads(path.read_text())
    if how == "scale":
        write_row(folder, "table1", "multi-query", [1.5], scale="paper", place="small")
    elif how == "steps":
        result["train"]["steps"] = 5
        path.write_text(json.dumps(result))
    elif how == "data":
        path.write_text(json.dumps({**result, "data": {**DATA, "fingerprint": "other"}}))
    elif how == "lacks":
        del result["scores"]
        path.write_text(json.dumps(result))
    elif how == "cut":
        path.write_text(path.read_text()[:50])
    elif how == "foreign":
        path.write_text("[]")


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("scale", "is of 'table1', scale 'paper', so results are mixed; move it to"),
        ("steps", "train.steps is 5 in it and 6000 elsewhere"),
        ("data", "its dataset is another"),
        ("lacks", "lacks scores; delete it and run its row again"),
        ("cut", "is not JSON"),
        ("foreign", "was not written by `writehead reproduce`"),
    ],
)
def test_results_that_do_not_fit_together_are_refused_in_a_sentence(
    writehead, tmp_path, how, words
):
    spoil(tmp_path / "results", how)
    command = ("report", f"--results={tmp_path / 'results'}", f"--readme={readme(tmp_path)}")
    code, out, err = writehead(*command, f"--output={tmp_path / 'out'}")
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert words in err
    assert err.count("\n") == 1


def test_a_missing_folder_file_or_marker_is_said(writehead, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "there is no folder nowhere" in writehead("report", "--results=nowhere")[2]
    assert "no README.md here to check" in writehead("report", "--check")[2]
    write_row(tmp_path / "results", "table1", "multi-head", [1.4])
    assert "none.md cannot be read" in writehead("report", "--readme=none.md")[2]
    (tmp_path / "bare.md").write_text("nothing\n")
    code, _, err = writehead("report", "--readme=bare.md")
    assert code == 2
    assert f"must have {BEGIN} and {END} once each" in err
    assert not (tmp_path / "docs").exists()
    assert writehead("report")[0] == 0
    assert (tmp_path / "docs" / "report" / "report.html").is_file()


def test_our_own_readme_says_what_our_own_results_give(writehead, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert writehead("report", "--check") == (0, "", "")


def test_every_measure_of_a_claim_is_in_its_table():
    for claim in CLAIMS:
        assert set(claim.measures) <= {measure.key for measure in MEASURES[claim.table]}


def test_the_losses_caption_says_how_far_multi_query_is_behind_as_it_is_trained(tmp_path):
    losses = {"multi-head": [1.40, 1.42], "multi-query": [1.44, 1.44, 9.9]}
    write_table(tmp_path, "table1", losses)
    rows = {"multi-head": [1.42, 1.42], "multi-query": [1.44, 1.40]}
    for row, values in rows.items():  # seed by seed another gap, whose mean stays 0 at half-way
        for seed, value in enumerate(values):
            path = result_path(tmp_path, "table1", "small", row, seed)
            one = json.loads(path.read_text())
            next(x for x in one["log"] if x["step"] == 3000)["dev_ln_ppl"] = value
            path.write_text(json.dumps(one))
    page = markdown(make_report(tmp_path), "figures")
    assert "multi-head's: +0.030 after 1,000, +0.030 after 2,000, +0.000 after 3,000, " in page
    assert "+0.030 after 6,000 steps, the mean of 2 seeds." in page


def test_without_both_rows_or_common_steps_the_losses_caption_has_no_figures(tmp_path):
    write_table(tmp_path, "table1", {"multi-head": [1.4]})
    page = markdown(make_report(tmp_path), "figures")
    assert "the mean over the seeds of both; colours as above.\n" in page


def test_without_multi_head_there_is_nothing_to_be_above(tmp_path):
    write_table(tmp_path, "table1", {"multi-query": [1.4]})
    report = make_report(tmp_path)
    assert "on a logarithmic scale; colours as above.\n" in markdown(report, "figures")
    assert "above multi-head" not in next(
        one.svg for one in report.sections[0].pictures if one.name.endswith("-loss")
    )


def test_a_folder_without_results_makes_no_report(tmp_path):
    with pytest.raises(RunError, match=r"there is no result in .*; give the folder that"):
        make_report(tmp_path)
