"""A run on disk."""

from pathlib import Path

import pytest
import torch

import helpers
from writehead.runs import save_run


@pytest.fixture
def run(tmp_path) -> Path:
    made = helpers.model(helpers.config("translation", bias=True), dtype=torch.float32)
    tokenizer = tmp_path / "bpe.model"
    tokenizer.write_bytes(b"\x00tokens")
    save_run(tmp_path / "run", made, tokenizer=tokenizer)
    tokenizer.unlink()
    return tmp_path / "run"
