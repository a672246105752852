import json
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def bench(writehead: Callable, quick_chip: None, tmp_path: Path) -> Callable[..., dict]:
    """Runs a benchmark that must succeed; returns its record."""

    def run(verb: str, *options: object) -> dict:
        path = tmp_path / "record.json"
        code, out, err = writehead("bench", verb, *options, "--output", path, "--force")
        assert code == 0, out + err
        result = json.loads(path.read_text())
        assert result["environment"]["command"].startswith(f"writehead bench {verb} ")
        assert "partial" not in result
        return result

    return run
