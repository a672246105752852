import json
from pathlib import Path

from writehead.bench.plots import markdown_table

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
