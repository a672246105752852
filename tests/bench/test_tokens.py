import json

import pytest
import torch

from helpers import config
from texts import sentences, tokenizer
from writehead.bench import tokens as bench
from writehead.decoding import Hypothesis
from writehead.model import TranslationModel, save_run

LINES = sentences(12, longest=4)


@pytest.fixture
def compare(writehead, tmp_path):
    """Runs the verb with an untrained model: exit code, output and the JSON."""
    torch.manual_seed(3)
    model = TranslationModel(config("translation", vocab_size=300, target_positions=20)).eval()
    tokenizer().save(tmp_path / "tokenizer")
    save_run(tmp_path / "run", model, tokenizer=tmp_path / "tokenizer")
    path, text = tmp_path / "tokens.json", tmp_path / "text"
    text.write_text("\n".join(["", *LINES, "the cat " * 40]))

    def run(*options):
        given = ("--input", text, "--device=cpu", "--output", path)
        code, out, err = writehead("bench", "tokens", tmp_path / "run", *given, *options)
        assert path.exists(), err
        return code, out, json.loads(path.read_text())

    return run


def test_differences_are_near_ties_and_a_wrong_token_gives_exit_code_1(compare, monkeypatch):
    code, _, result = compare("--dtype=bfloat16", "--beam=3")
    assert (code, result["others"], result["sentences"]) == (0, 0, len(LINES))
    [row] = result["rows"]
    assert row["same"] + len(row["near_ties"]) + len(row["unproved"]) == len(LINES)
    assert all(0 <= one["difference"] <= one["tolerance"] for one in row["near_ties"])
    decode = bench.decode

    def swapped(worker, jobs, beam):
        found = decode(worker, jobs, beam)
        found[6] = Hypothesis((250, *found[6].tokens[1:]), 0.0, 0.0, found[6].finished)
        return found

    monkeypatch.setattr(bench, "decode", swapped)
    code, out, result = compare("--beam=4", "--force")
    assert (code, "line 8" in out) == (1, True)
    [wrong] = [one for one in result["rows"][0]["others"] if one["line"] == 8]
    assert (wrong["step"], wrong["ours"]) == (1, 250)
    assert wrong["difference"] > wrong["tolerance"]
