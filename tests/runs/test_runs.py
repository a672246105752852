"""Runs on disk: they load as they were saved, and any damage is an error."""

import hashlib
import os

import pytest
import torch

from helpers import config, edit_config, edit_weights, tokens
from writehead.errors import ConfigError, DamagedRun, DataError, RunError
from writehead.model import make_model
from writehead.runs import folder, load_run, save_run

TINY = config("translation", bias=True)
NAMES = ("config.json", "model.safetensors", "tokenizer.model")


def embeddings(run):
    return load_run(run).model.tokens.weight.detach()


@pytest.mark.parametrize("positions", ["learned", "sinusoidal", "rotary"])
@pytest.mark.parametrize("task", ["translation", "language"])
def test_a_run_loads_as_it_was_saved(tmp_path, task, positions):
    model, place = make_model(config(task, positions=positions, k=6)).eval(), tmp_path / "deep/run"
    (tmp_path / "bpe.model").write_bytes(b"\x00tokens")
    save_run(place, model, tokenizer=tmp_path / "bpe.model")
    loaded = load_run(place)
    assert loaded.model.config == model.config
    assert not loaded.model.training
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], tensor), name
    inputs = [tokens(2, 5)] * (2 if task == "translation" else 1)
    assert torch.equal(loaded.model(*inputs), model(*inputs))
    assert (loaded.tokenizer / "tokenizer.model").read_bytes() == b"\x00tokens"
    assert load_run(place, dtype=torch.bfloat16).model.dtype == torch.bfloat16
    with pytest.raises(ConfigError, match="device 'cuda:77'"):
        load_run(place, device="cuda:77")


def test_a_run_of_format_1_loads(run):
    def change(data):
        names = {new: old for old, new in folder.FORMAT_1_NAMES.items()}
        data["model"] = {names.get(name, name): value for name, value in data["model"].items()}
        data["format"] = 1

    before = load_run(run).model.config
    edit_config(run, change)
    assert load_run(run).model.config == before


@pytest.mark.parametrize("linked", [False, True])
def test_an_existing_run_is_replaced_whole_and_only_with_overwrite(run, linked):
    place, before, model = run, embeddings(run), make_model(TINY)
    if linked:
        place = run.parent / "link"
        place.symlink_to(run.name)
    with pytest.raises(RunError, match="exists"):
        save_run(place, model)
    with pytest.raises(DataError, match=r"no\.model cannot be read"):
        save_run(place, model, tokenizer=run.parent / "no.model", overwrite=True)
    assert torch.equal(embeddings(run), before)
    save_run(place, model, overwrite=True)
    assert torch.equal(embeddings(run), model.tokens.weight)
    assert place.is_symlink() == linked
    assert {path.name for path in run.parent.iterdir()} == {"run", place.name}
    (run / "chapter1.tex").touch()
    for words in ("more than a run", "is not a run"):
        with pytest.raises(RunError, match=words):
            save_run(run, model, overwrite=True)
        (run / folder.CONFIG).unlink(missing_ok=True)
    assert (run / "chapter1.tex").exists()


def test_a_finished_run_replaces_another_whole_even_if_it_was_interrupted(run, monkeypatch):
    weights, before = make_model(TINY).state_dict(), embeddings(run)
    replace, left = os.replace, ["tokenizer", "weights"]

    def killed(source, target):
        if not left:
            raise KeyboardInterrupt
        left.pop()
        replace(source, target)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        folder.finish_run(run, TINY, weights, {"tokenizer.model": b"tokens"})
    now = embeddings(run)  # of one of them, whose checksum is that of the other at no moment
    assert torch.equal(now, before) or torch.equal(now, weights["tokens.weight"])
    monkeypatch.undo()
    folder.finish_run(run, TINY, weights, {"tokenizer.model": b"tokens"})
    assert torch.equal(embeddings(run), weights["tokens.weight"])


def test_a_missing_run_is_an_error_with_a_hint(run, tmp_path):
    for place, words in (
        (tmp_path / "nowhere", "there is no run at"),
        (tmp_path, "it contains one: .*/run$"),
    ):
        with pytest.raises(RunError, match=words):
            load_run(place)
    for name in (folder.WEIGHTS, folder.CONFIG):
        (run / name).unlink()
        with pytest.raises(RunError, match=f"has no {name}"):
            load_run(run)
    run.rename(tmp_path / ".run.0123abcd.old")
    with pytest.raises(RunError, match=r"\.run\.0123abcd\.old"):
        load_run(run)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": {"vocab_sizes": 3}}, "did you mean 'vocab_size'"),
        ({"formatt": 1}, "did you mean 'format'"),
        ({"format": True}, "format is True"),
        ({"format": 99}, "format 99; install a newer"),
        ({"model": {"tied": False}}, "does not match its config: .*output.weight"),
    ],
)
def test_an_invalid_config_is_an_error(run, changes, words):
    inner = changes.get("model", {})
    edit_config(run, lambda data: data.update(changes | {"model": data["model"] | inner}))
    with pytest.raises(RunError, match=words):
        load_run(run)


def test_wrong_names_and_dtypes_of_weights_are_errors(run):
    edit_weights(run, lambda W: W.update({"token.weight": W.pop("tokens.weight")}))
    with pytest.raises(RunError, match=r"does not match its config: .*token\.weight"):
        load_run(run)
    edit_weights(run, lambda W: W.update({"tokens.weight": W.pop("token.weight").bfloat16()}))
    with pytest.raises(RunError, match="pass the dtype"):
        load_run(run)
    assert load_run(run, dtype=torch.float32).model.tokens.weight.dtype == torch.float32
    edit_weights(run, lambda W: W.update({name: T.long() for name, T in W.items()}))
    with pytest.raises(RunError, match="does not match its config"):
        load_run(run)


@pytest.mark.parametrize("kept", [0, 200, None])
def test_truncated_or_pickled_weights_are_errors(run, kept):
    if kept is None:
        torch.save({"tokens.weight": torch.zeros(1)}, run / folder.WEIGHTS)
    else:
        os.truncate(run / folder.WEIGHTS, kept)
    with pytest.raises(RunError, match="damaged or truncated"):
        load_run(run)


@pytest.mark.parametrize("name", NAMES)
def test_a_changed_byte_of_any_file_does_not_match_its_sha256sum(run, name):
    lines = [f"{hashlib.sha256((run / n).read_bytes()).hexdigest()}  {n}\n" for n in NAMES]
    assert (run / folder.CHECKSUMS).read_text() == "".join(lines)
    content = (run / name).read_bytes()
    last = b" " if name == folder.CONFIG else bytes([content[-1] ^ 1])  # JSON as good as before
    (run / name).write_bytes(content[:-1] + last)
    with pytest.raises(DamagedRun, match=f"{name} does not match"):
        load_run(run)
    (run / folder.CHECKSUMS).unlink()  # as in a run that was made by hand
    load_run(run)


@pytest.mark.parametrize("text", [b"", b"\xff", b"0" * 64 + b"  model.safetensors", b"\0" * 2**21])
def test_a_file_without_a_valid_checksum_is_an_error(run, text):
    (run / folder.CHECKSUMS).write_bytes(text)
    with pytest.raises(DamagedRun, match="does not match"):
        load_run(run)
