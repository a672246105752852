import json

import pytest
import torch

from helpers import config
from texts import sentences, tokenizer
from writehead.bench import tokens as bench
from writehead.data.tokenizer import END
from writehead.decoding import Hypothesis
from writehead.model import TranslationModel, save_run

LINES = sentences(12, longest=4)


@pytest.fixture
def compare(writehead, tmp_path):
    """Runs the verb with an untrained model: exit code, output, the JSON and the model."""
    torch.manual_seed(3)
    model = TranslationModel(config("translation", vocabulary=300, target_positions=20)).eval()
    tokenizer().save(tmp_path / "tokenizer")
    save_run(tmp_path / "run", model, tokenizer=tmp_path / "tokenizer")
    path, text = tmp_path / "tokens.json", tmp_path / "text"
    text.write_text("\n".join(["", *LINES, "the cat " * 40]))

    def run(*options):
        given = ("--input", text, "--device=cpu", "--output", path)
        code, out, err = writehead("bench", "tokens", tmp_path / "run", *given, *options)
        assert path.exists(), err
        return code, out, json.loads(path.read_text()), model

    return run


def test_every_difference_is_a_near_tie_as_whole_passes_over_the_sentence_say(compare):
    code, _, result, model = compare("--dtype=bfloat16", "--dtype=float32", "--beam=1", "--beam=3")
    assert (code, result["others"]) == (0, 0)
    assert (result["sentences"], result["empty"]) == (len(LINES), [1])
    assert result["left_out"] == [len(LINES) + 2]  # longer than the model reads
    for row in result["rows"]:
        assert row["same"] + len(row["near_ties"]) + len(row["unproved"]) == len(LINES)
        assert all(0 <= one["difference"] <= one["tolerance"] for one in row["near_ties"])
        assert not any(found["others"] for found in row["batches"].values())
    assert all(row["same"] >= len(LINES) - 2 for row in result["rows"] if row["dtype"] == "float32")
    for one in (one for row in result["rows"] if row["beam"] == 1 for one in row["near_ties"]):
        source = torch.tensor([[*tokenizer().encode(LINES[one["line"] - 2]), END]])
        fed = [model.config.start]
        for _ in range(one["step"]):
            with torch.no_grad():
                logits = model(source, torch.tensor([fed]))[0, -1]
            fed.append(int(logits.argmax()))
        log_p = torch.log_softmax(logits, dim=0)
        gap = float(log_p[one["reference"]] - log_p[one["ours"]])
        assert one["difference"] == pytest.approx(gap, abs=1e-5)


@pytest.mark.parametrize("beam", [1, 4])
def test_a_wrong_token_is_no_near_tie_and_gives_exit_code_1(compare, monkeypatch, beam):
    decode = bench.decode

    def swapped(worker, jobs, beam):
        found = decode(worker, jobs, beam)
        found[6] = Hypothesis((250, *found[6].tokens[1:]), 0.0, 0.0, found[6].finished)
        return found

    monkeypatch.setattr(bench, "decode", swapped)
    code, out, result, _ = compare(f"--beam={beam}")
    assert (code, "line 8" in out) == (1, True)
    [wrong] = [one for one in result["rows"][0]["others"] if one["line"] == 8]
    assert (wrong["step"], wrong["ours"]) == (1, 250)
    assert wrong["difference"] > wrong["tolerance"]
