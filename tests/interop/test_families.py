"""Imported models compute and decode what transformers' own code does, and go back unchanged.

In float64, where no two tokens are nearly equally likely.
"""

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from torch.testing import assert_close

from helpers import tokens
from witnesses import MODELS, saved, witness
from writehead import export_model, import_model, load_run
from writehead.config import DecodeConfig
from writehead.engine import beam_search
from writehead.interop.pretrained import read_pretrained
from writehead.model import LanguageModel, TranslationModel

every_model = pytest.mark.parametrize("name", MODELS)
LENGTHS = [5, 1, 3, 7, 2, 4]
b, m = len(LENGTHS), max(LENGTHS)
# their positions are rounded to float32
TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}


def some_tokens(rows: int, columns: int) -> Tensor:
    return tokens(rows, columns, vocab_size=50) + 2


def padded(rows: Tensor, pad: int, *, left: bool) -> tuple[Tensor, Tensor]:
    """The first LENGTHS tokens of each row with padding on one side, and their mask."""
    given, mask = torch.full_like(rows, pad), torch.zeros_like(rows)
    for i, n in enumerate(LENGTHS):
        place = slice(m - n, m) if left else slice(n)
        given[i, place], mask[i, place] = rows[i, :n], 1
    return given, mask


@torch.no_grad()
def logits(theirs, source: Tensor, target: Tensor) -> Tensor:
    if theirs.config.is_encoder_decoder:
        return theirs(input_ids=source, decoder_input_ids=target).logits
    return theirs(input_ids=target).logits


@every_model
@torch.no_grad()
def test_forward_passes_and_cached_steps_give_their_logits(tmp_path, name):
    theirs = saved(tmp_path, name)
    model = load_run(tmp_path, dtype=torch.float64).model
    source, target = some_tokens(3, 11), some_tokens(3, 9)
    expected = logits(theirs, source, target)
    assert expected.std() > 0.5  # far from zero, and so from one another
    if isinstance(model, TranslationModel):
        assert_close(model(source, target), expected, **TOLERANCE)
        state, first = model.start(source, 9), 0
    else:
        assert_close(model(target), expected, **TOLERANCE)
        state, first = model.start(target[:, :4], 9), 3
    model.pack()
    for i in range(first, 9):
        assert_close(model.step(target[:, i], state), expected[:, i], **TOLERANCE)


def search(model, rows: Tensor, beam: int, eos: int):
    """Our search: the sequences of each row with their scores."""
    config = DecodeConfig(max_length=12, beam=beam, n_best=beam, alpha=0.0)
    lengths = torch.tensor(LENGTHS)
    if isinstance(model, LanguageModel):
        state = model.start(rows, m + 12, prompt_lengths=lengths)
    else:
        state = model.start(rows, 12, source_lengths=lengths)
    found = list(beam_search(model.step, state, config, eos=eos))
    return [(tuple(one.tokens), one.finished, one.score) for row in found for one in row]


def their_search(theirs, rows: Tensor, beam: int, eos: int | None):
    """The search of transformers, over all rows at once."""
    is_language, pad = not theirs.config.is_encoder_decoder, theirs.config.pad_token_id
    given, mask = padded(rows, pad, left=is_language)
    beams = {"num_beams": 4, "num_return_sequences": 4, "length_penalty": 0.0}
    output = theirs.generate(
        given,
        attention_mask=mask,
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=pad,
        max_new_tokens=12,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        **({} if beam == 1 else beams | {"early_stopping": "never"}),
    )
    start = m if is_language else 1
    scores = getattr(output, "sequences_scores", None)
    found = []
    for i, row in enumerate(output.sequences[:, start:].tolist()):
        is_finished = eos in row
        row = row[: row.index(eos) + 1] if is_finished else row
        if scores is None:
            steps = torch.stack(output.logits)[: len(row), i].log_softmax(-1)
            score = float(steps.gather(1, torch.tensor(row).unsqueeze(1)).sum())
        else:
            score = float(scores[i])
        found.append((tuple(row[: len(row) - is_finished]), is_finished, score))
    return found


@every_model
@pytest.mark.parametrize("beam", [1, 4])
def test_searches_find_what_theirs_find(tmp_path, name, beam):
    theirs = saved(tmp_path, name)
    model, rows = load_run(tmp_path, dtype=torch.float64).model, some_tokens(b, m)
    theirs.generation_config.eos_token_id = None
    unfinished = their_search(theirs, rows, 1, None)
    texts = [text for text, _, _ in unfinished]
    # a token that their greedy search comes to in about half of the rows, but not at once
    seen = sorted({token for text in texts for token in text[1:]})
    counts = {token: sum(token in text[1:] for text in texts) for token in seen}
    eos = min(counts, key=lambda token: abs(counts[token] - b / 2))
    expected, found = their_search(theirs, rows, beam, eos), search(model, rows, beam, eos)
    assert any(is_finished for _, is_finished, _ in expected)
    assert [one[:2] for one in found] == [one[:2] for one in expected]
    scores = torch.tensor(
        [[one[2] for one in ours_or_theirs] for ours_or_theirs in (found, expected)]
    )
    assert_close(scores[0], scores[1], **TOLERANCE)


@every_model
def test_export_gives_back_the_same_files_and_import_the_same_tensors(tmp_path, name):
    saved(tmp_path / "theirs", name, dtype=torch.bfloat16)
    import_model(tmp_path / "theirs", tmp_path / "run")
    export_model(tmp_path / "run", tmp_path / "again")
    before, after = (
        load_file(tmp_path / folder / "model.safetensors") for folder in ("theirs", "again")
    )
    assert list(before) == list(after)
    assert all(
        torch.equal(before[one].view(torch.int16), after[one].view(torch.int16)) for one in before
    )
    for file in ("config.json", "generation_config.json"):
        content = (tmp_path / "theirs" / file).read_bytes()
        assert (tmp_path / "again" / file).read_bytes() == content
    ours, again = (read_pretrained(tmp_path / folder) for folder in ("theirs", "again"))
    assert again.config == ours.config == load_run(tmp_path / "run").model.config
    assert all(torch.equal(W, again.weights[one]) for one, W in ours.weights.items())


@every_model
def test_a_changed_model_goes_back_to_its_family(tmp_path, name):
    """Trained weights have the names of their family, and transformers loads them."""
    theirs = saved(tmp_path / "theirs", name, dtype=torch.float32)
    import_model(tmp_path / "theirs", tmp_path / "run")
    run = load_run(tmp_path / "run")
    (tmp_path / "run" / "original.json").unlink()  # as after training
    (tmp_path / "run" / "checksums.sha256").unlink()
    export_model(tmp_path / "run", tmp_path / "again")
    auto = "AutoModelForSeq2SeqLM" if theirs.config.is_encoder_decoder else "AutoModelForCausalLM"
    again, info = getattr(transformers, auto).from_pretrained(
        tmp_path / "again", output_loading_info=True
    )
    assert not any(info.values()), info
    source, target = some_tokens(2, 9), some_tokens(2, 7)
    assert_close(logits(again.eval(), source, target), logits(theirs, source, target), **TOLERANCE)
    assert again.config.eos_token_id == run.model.config.eos


def test_witnesses_differ_from_a_new_model():
    gains = [P for name, P in witness("gemma").named_parameters() if "norm" in name]
    assert min(float(P.abs().min()) for P in gains) > 0.0
