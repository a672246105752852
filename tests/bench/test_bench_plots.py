import json
import re
from pathlib import Path

from writehead.bench.plots import markdown_table

RESULTS = Path(__file__).parents[2] / "results" / "decoding"


RECORD = RESULTS / "decode-systems.json"


def test_the_chart_names_every_system_on_light_and_dark(writehead, tmp_path):
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


def test_readme_shows_the_table_of_the_record():
    readme = (RESULTS.parents[1] / "README.md").read_text(encoding="utf-8")
    shown = re.search(r"<!-- decode table -->\n(.*?)<!-- /decode table -->", readme, re.DOTALL)
    assert shown is not None
    assert shown[1] == markdown_table(json.loads(RECORD.read_text(encoding="utf-8")))
