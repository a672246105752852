import json
from pathlib import Path

import pytest

from writehead.bench.plots import markdown_table

RESULTS = Path(__file__).parents[2] / "results" / "decoding"


@pytest.fixture
def record():
    """A record of `bench decode` with two batches, made of one of an earlier version."""
    result = json.loads((RESULTS / "decode-peers.json").read_text(encoding="utf-8"))
    rows = [row for row in result["rows"] if row["model"]["window"] is None]
    for row in rows:
        row["measured"]["CTranslate2"] = row["measured"]["ours, true lengths"]
    small = json.loads(json.dumps(rows))
    for row in small:
        row["setting"]["batch"] = 2
        del row["measured"]["Hugging Face"]
    return result | {"rows": rows + small}


def test_the_chart_names_every_system_on_light_and_dark(writehead, record, tmp_path):
    path = tmp_path / "decode.json"
    path.write_text(json.dumps(record))
    code, out, err = writehead("bench", "plot", path, tmp_path / "plots", "--table")
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
    assert lines[0][1:3] == ["batch 2, greedy", "batch 2, beam 4"]
    table = {name: cells for name, *cells in lines}
    assert table["writehead, multi-query"] == ["0.867", "2.4", "0.867", "2.4"]
    assert table["Hugging Face, multi-head"] == ["–", "–", "5.28", "44.9"]
