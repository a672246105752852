import dataclasses
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from writehead.errors import ConfigError, RunError
from writehead.model import load_run, make_model, runs, save_run
from writehead.model.checksum import CHECKSUMS
from writehead.paper.presets import preset

TINY = dataclasses.replace(preset("tiny/multi-query-local"), vocabulary=37, d=24, f=20, dropout=0.0)
TINY_LM = dataclasses.replace(preset("tiny-lm/multi-query"), vocabulary=37, d=24, f=20)


@pytest.fixture
def run(tmp_path):
    directory = tmp_path / "run"
    save_run(directory, make_model(TINY).eval())
    return directory


def test_loading_draws_no_weights_and_so_does_not_import_the_compiler(run):
    program = (
        "import sys; from writehead.model import load_run; "
        f"load_run({str(run)!r}); print('torch._dynamo' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


def edit_config(run, **changes):
    path = run / runs.CONFIG
    data = json.loads(path.read_text())
    data.update({key: value for key, value in changes.items() if key != "model"})
    data["model"].update(changes.get("model", {}))
    path.write_text(json.dumps(data))


@pytest.mark.parametrize("config", [TINY, TINY_LM], ids=["translation", "language"])
def test_a_run_comes_back_as_it_was_saved(tmp_path, config):
    model = make_model(config).eval()
    tokenizer = tmp_path / "bpe.model"
    tokenizer.write_bytes(b"\x00tokens")
    save_run(tmp_path / "deep" / "run", model, tokenizer=tokenizer)
    loaded = load_run(tmp_path / "deep" / "run")
    assert loaded.model.config == config
    assert not loaded.model.training
    assert all(parameter.requires_grad for parameter in loaded.model.parameters())
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], tensor), name
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.read_bytes() == b"\x00tokens"


def test_a_run_can_be_loaded_in_another_dtype(run):
    loaded = load_run(run, dtype=torch.bfloat16)
    assert loaded.model.dtype == torch.bfloat16
    assert loaded.tokenizer is None


def test_an_existing_run_is_replaced_only_when_told_to(run):
    before = load_file(run / runs.WEIGHTS)
    with pytest.raises(RunError, match="exists; choose another place"):
        save_run(run, make_model(TINY))
    assert load_file(run / runs.WEIGHTS).keys() == before.keys()
    model = make_model(TINY)
    save_run(run, model, overwrite=True)
    assert torch.equal(load_file(run / runs.WEIGHTS)["tokens.weight"], model.tokens.weight)
    assert [path.name for path in run.parent.iterdir()] == ["run"]


def test_a_dataset_is_told_from_a_run(tmp_path):
    (tmp_path / "dataset.json").write_text("{}")
    with pytest.raises(RunError, match="is a dataset, not a run; `writehead train` makes a run"):
        load_run(tmp_path)


def test_behind_a_link_the_run_is_replaced_and_the_link_stays(run):
    link = run.parent / "link"
    link.symlink_to(run.name)
    model = make_model(TINY)
    save_run(link, model, overwrite=True)
    assert link.is_symlink()
    assert torch.equal(load_file(run / runs.WEIGHTS)["tokens.weight"], model.tokens.weight)
    assert sorted(path.name for path in run.parent.iterdir()) == ["link", "run"]


def test_a_folder_that_is_not_a_run_is_never_overwritten(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("years of work")
    with pytest.raises(RunError, match="is not a run, so it is not overwritten"):
        save_run(tmp_path / "thesis", make_model(TINY), overwrite=True)
    assert (tmp_path / "thesis" / "chapter1.tex").exists()


def test_a_save_that_fails_half_way_leaves_the_old_run_and_no_litter(run, monkeypatch):
    before = load_file(run / runs.WEIGHTS)["tokens.weight"]

    def full_disk(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(runs, "save_file", full_disk)
    with pytest.raises(RunError, match="No space left on device"):
        save_run(run, make_model(TINY), overwrite=True)
    assert torch.equal(load_run(run).model.tokens.weight, before)
    assert [path.name for path in run.parent.iterdir()] == ["run"]


def test_a_replacement_that_cannot_be_moved_in_puts_the_old_run_back(run, monkeypatch):
    before = load_file(run / runs.WEIGHTS)["tokens.weight"]
    rename = type(run).rename

    def stubborn(self, target):
        if target == run and not self.name.endswith(".old"):
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(type(run), "rename", stubborn)
    with pytest.raises(RunError, match="Input/output error"):
        save_run(run, make_model(TINY), overwrite=True)
    assert torch.equal(load_run(run).model.tokens.weight, before)


def test_a_run_killed_while_being_replaced_is_pointed_to(run):
    run.rename(run.parent / ".run.0123abcd.old")
    with pytest.raises(RunError, match=r"\.run\.0123abcd\.old: move it back"):
        load_run(run)


def test_a_place_that_cannot_be_written_is_one_of_our_errors(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RunError, match="could not be written"):
        save_run(tmp_path / "file" / "run", make_model(TINY))


def test_a_missing_tokenizer_is_one_of_our_errors(tmp_path):
    with pytest.raises(RunError, match="could not be written"):
        save_run(tmp_path / "run", make_model(TINY), tokenizer=tmp_path / "no.model")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_run_or_file_says_which(run):
    with pytest.raises(RunError, match="there is no run at"):
        load_run(run.parent / "nowhere")
    (run / runs.WEIGHTS).unlink()
    with pytest.raises(RunError, match=r"has no model\.safetensors"):
        load_run(run)
    (run / runs.CONFIG).unlink()
    with pytest.raises(RunError, match=r"has no config\.json"):
        load_run(run)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": {"vocabularry": 3}}, "unknown model field 'vocabularry'; did you mean 'vocab"),
        ({"model": {"g": 3}}, "g=3 write-heads cannot serve h=8"),
        ({"model": {"d": "24"}}, "d='24' is not a whole number"),
        ({"formatt": 1}, "unknown key 'formatt'; did you mean 'format'"),
        ({"format": 0}, "format 0; this writehead writes 1"),
        ({"format": "1"}, "format '1'; this writehead writes 1"),
        ({"format": True}, "format True; this writehead writes 1"),
        ({"format": 99, "writehead": "9.0"}, "format 99 .*9.0.* install a newer one"),
        ({"model": {"d": 32}}, "has shape .* and its config asks for"),
        ({"model": {"tied": False}}, "lacks the tensor 'output.weight'"),
    ],
)
def test_a_config_that_does_not_fit_says_what_is_wrong(run, changes, words):
    edit_config(run, **changes)
    with pytest.raises(RunError, match=words):
        load_run(run)


def test_a_config_that_is_not_json_says_what_to_do(run):
    (run / runs.CONFIG).write_text("{")
    with pytest.raises(RunError, match=r"is not JSON: .*; copy or save the run again"):
        load_run(run)


@pytest.mark.parametrize("text", ["{", "[]", "null", '{"format": 1}', "\udcff"])
def test_a_config_that_is_no_config_is_one_of_our_errors(run, text):
    (run / runs.CONFIG).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(RunError, match=r"config\.json"):
        load_run(run)


def test_an_unknown_tensor_is_named_with_the_nearest(run):
    weights = load_file(run / runs.WEIGHTS)
    weights["token.weight"] = weights.pop("tokens.weight")
    save_file(weights, run / runs.WEIGHTS)
    with pytest.raises(RunError, match=r"unknown tensor 'token\.weight'; did you mean 'tokens"):
        load_run(run)


def change_weight(run, name, dtype):
    weights = load_file(run / runs.WEIGHTS)
    weights[name] = weights[name].to(dtype)
    save_file(weights, run / runs.WEIGHTS)


def test_weights_that_are_not_floating_point_are_refused(run):
    change_weight(run, "tokens.weight", torch.int64)
    with pytest.raises(RunError, match=r"'tokens\.weight' is torch\.int64"):
        load_run(run)


def test_weights_of_several_dtypes_ask_for_one(run):
    change_weight(run, "tokens.weight", torch.bfloat16)
    with pytest.raises(RunError, match=r"mixes torch\.bfloat16 and torch\.float32; give the dtype"):
        load_run(run)
    (run / CHECKSUMS).unlink()
    assert load_run(run, dtype=torch.float32).model.tokens.weight.dtype == torch.float32


@pytest.mark.parametrize("device", ["nonsense", "cuda:77"])
def test_a_device_that_is_not_there_is_not_blamed_on_the_file(run, device):
    with pytest.raises(ConfigError, match=f"device '{device}' cannot be used"):
        load_run(run, device=device)


@pytest.mark.parametrize("kept", [0, 7, 200, -1])
def test_a_file_cut_short_is_one_of_our_errors(run, kept):
    path = run / runs.WEIGHTS
    os.truncate(path, kept if kept >= 0 else path.stat().st_size - 1)
    with pytest.raises(RunError, match="damaged or cut short"):
        load_run(run)


def test_a_run_finished_once_more_has_no_checksum_of_other_weights(run, monkeypatch):
    weights = make_model(TINY).state_dict()
    replace, left = os.replace, ["tokenizer", "weights"]

    def killed(source, target):
        if not left:
            raise KeyboardInterrupt
        left.pop()
        replace(source, target)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        runs.finish_run(run, TINY, weights, b"tokens")
    assert torch.equal(load_run(run).model.tokens.weight, weights["tokens.weight"])
    monkeypatch.undo()
    runs.finish_run(run, TINY, weights, b"tokens")
    assert sorted(path.name for path in run.iterdir()) == sorted(runs.FILES - {runs.OLD_CHECKSUM})
    assert torch.equal(load_run(run).model.tokens.weight, weights["tokens.weight"])


def test_a_pickle_in_place_of_the_weights_is_not_read(run):
    torch.save({"tokens.weight": torch.zeros(1)}, run / "pickle")
    shutil.move(run / "pickle", run / runs.WEIGHTS)
    with pytest.raises(RunError, match="damaged or cut short"):
        load_run(run)


def test_a_run_with_checkpoints_beside_it_is_not_overwritten(run):
    (run / "checkpoints").mkdir()
    with pytest.raises(RunError, match=r"holds more than a run \(checkpoints\)"):
        save_run(run, make_model(TINY), overwrite=True)
    assert (run / "checkpoints").is_dir()


def test_a_folder_of_runs_names_one_of_them(tmp_path):
    save_run(tmp_path / "own" / "tiny", make_model(TINY))
    with pytest.raises(RunError, match=r"own is no run; there is one inside it: .*own/tiny$"):
        load_run(tmp_path / "own")
    with pytest.raises(RunError, match=r"inside it: .*own/tiny$"):
        load_run(tmp_path)
