"""What import, export and --force refuse: pickles, tokenizers, kept originals, other folders."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import foreign_tokenizers
import witnesses
from helpers import config, model
from texts import tokenizer
from writehead import Engine, convert, export_model, import_model, save_run
from writehead.data.tokenizer import load_tokenizer
from writehead.errors import RunError, WriteheadError
from writehead.interop.pretrained import load_run


@pytest.fixture
def gpt2(tmp_path) -> Path:
    """A GPT-2 model with its tokenizer."""
    kind, sizes = witnesses.MODELS["gpt2"]
    folder = tmp_path / "gpt2"
    folder.mkdir()
    size = len(foreign_tokenizers.gpt2(folder))
    ends = {"bos_token_id": size - 1, "eos_token_id": size - 1, "pad_token_id": size - 1}
    made = transformers.AutoConfig.for_model(kind, **(sizes | ends | {"vocab_size": size + 3}))
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(made).save_pretrained(folder)
    return folder


def pickle_weights(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def advised(error: str) -> list[str]:
    """The command of an error, as a shell reads it."""
    _, command, *options = shlex.split(re.search(r"python -c .*", error)[0])
    return [sys.executable, command, *options]


def test_the_advised_command_converts_pickled_weights(tmp_path, gpt2):
    """One model of each task, with a folder whose name a shell would split."""
    (tmp_path / "it's marian").mkdir()
    foreign_tokenizers.marian(tmp_path / "it's marian")
    kind, sizes = witnesses.MODELS["marian"]
    size = load_tokenizer(tmp_path / "it's marian").vocab_size
    start = {"decoder_start_token_id": size - 1, "pad_token_id": size - 1, "vocab_size": size}
    made = transformers.AutoConfig.for_model(kind, **(sizes | start))
    transformers.AutoModelForSeq2SeqLM.from_config(made).save_pretrained(tmp_path / "it's marian")
    for folder in (gpt2, tmp_path / "it's marian"):
        expected = load_file(folder / "model.safetensors")
        pickle_weights(folder)
        with pytest.raises(RunError, match="can run code") as caught:
            import_model(folder, tmp_path / "run")
        given = {"capture_output": True, "text": True, "cwd": tmp_path, "check": False}
        done = subprocess.run(advised(str(caught.value)), **given)
        assert done.returncode == 0, done.stderr
        import_model(tmp_path / f"{folder.name}-safetensors", tmp_path / f"{folder.name}-run")
        again = load_file(tmp_path / f"{folder.name}-safetensors" / "model.safetensors")
        assert all(torch.equal(T, again[name]) for name, T in expected.items() if name in again)
        assert load_tokenizer(tmp_path / f"{folder.name}-run").encode("the cat")


def test_a_repository_with_pickled_weights_only_says_so(tmp_path, gpt2, monkeypatch):
    pickle_weights(gpt2)
    (gpt2 / "pytorch_model.bin").unlink()  # is not downloaded
    ignored: list[str] = []

    def download(name: str, *, ignore_patterns: list[str], **_: object) -> str:
        ignored[:] = ignore_patterns
        return str(gpt2)

    def listed(name: str, **_: object) -> list[str]:
        return ["config.json", "pytorch_model.bin"]

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr("huggingface_hub.list_repo_files", listed)
    with pytest.raises(RunError, match="owner/model has pickled weights") as caught:
        import_model("owner/model", tmp_path / "run", revision="v1")
    command = advised(str(caught.value))[2]
    assert "AutoModelForCausalLM" in command
    assert "a, b = 'owner/model', 'model-safetensors'" in command
    assert "revision='v1'" in command
    assert any(pattern.startswith("consolidated") for pattern in ignored)


TOKENIZER_DAMAGES = {
    "tokenizer.json is damaged": lambda f: (f / "tokenizer.json").write_text('{"model": 1}'),
    "no complete tokenizer": lambda f: (f / "tokenizer.json").unlink(),
    "does not fit the model": lambda f: foreign_tokenizers.llama(f),
    "eos_token_id": lambda f: (f / "generation_config.json").write_text('{"eos_token_id": "a"}'),
    r"does not have our special tokens; add the tokenizer.json": lambda f: gemma_style(f),
}


def gemma_style(folder: Path) -> None:
    """A sentencepiece model with our pad and eos, but other ids of bos and unk, as Gemma has."""
    (folder / "tokenizer.json").unlink()
    foreign_tokenizers.train_spm(
        folder / "tokenizer.model",
        foreign_tokenizers.corpus(),
        300,
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
    )


@pytest.mark.parametrize("words", TOKENIZER_DAMAGES)
def test_a_tokenizer_is_checked_before_anything_is_written(tmp_path, gpt2, words):
    TOKENIZER_DAMAGES[words](gpt2)
    with pytest.raises(WriteheadError, match=words) as caught:
        import_model(gpt2, tmp_path / "run")
    with pytest.raises(type(caught.value), match=words):
        Engine.load(gpt2, "cpu")
    assert "writehead " not in str(caught.value).replace("writehead;", "")
    assert not (tmp_path / "run").exists()


def test_a_model_without_any_tokenizer_is_imported_with_a_warning(tmp_path, caplog):
    witnesses.saved(tmp_path / "llama", "llama")
    import_model(tmp_path / "llama", tmp_path / "run")
    assert "no tokenizer" in caplog.text


def rewrite_original(run: Path, change) -> None:
    file = run / "original.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps(change(content) or content))


def extra_tensor(run: Path) -> None:
    save_file({"transformer.wte.weight": torch.ones(3, 2)}, run / "original.safetensors")
    rewrite_original(run, lambda o: {**o, "tensors": [*o["tensors"], "transformer.x"]})


ORIGINAL_DAMAGES = {
    "original.json is damaged": lambda r: rewrite_original(r, lambda o: {**o, "tensors": 5}),
    "original.json lacks config": lambda r: rewrite_original(
        r, lambda o: {"tensors": [], "dtype": ""}
    ),
    "its config is damaged": lambda r: rewrite_original(r, lambda o: {**o, "config": "[1]"}),
    "its config is damaged: .*Expect": lambda r: rewrite_original(
        r, lambda o: {**o, "config": "{"}
    ),
    "has model_type 'bert'": lambda r: rewrite_original(
        r, lambda o: {**o, "config": '{"model_type": "bert"}'}
    ),
    "does not name each tensor": lambda r: rewrite_original(r, lambda o: {**o, "tensors": []}),
    "name each tensor of the model once: transformer.h.0": lambda r: rewrite_original(
        r, lambda o: {**o, "tensors": [n for n in o["tensors"] if "ln_1" not in n]}
    ),
    "once: .*wte": extra_tensor,
    "original.safetensors is damaged": lambda r: (r / "original.safetensors").write_bytes(
        b"\0" * 9
    ),
}


@pytest.mark.parametrize("words", ORIGINAL_DAMAGES)
def test_a_damaged_original_is_an_error_with_and_without_checksums(tmp_path, gpt2, words):
    import_model(gpt2, tmp_path / "run")
    ORIGINAL_DAMAGES[words](tmp_path / "run")
    if words != "original.safetensors is damaged":  # which was not there
        with pytest.raises(RunError, match="does not match its SHA-256"):
            export_model(tmp_path / "run", tmp_path / "out")
    (tmp_path / "run" / "checksums.sha256").unlink()
    with pytest.raises(WriteheadError, match=words):
        export_model(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_force_replaces_only_what_writehead_wrote(tmp_path, gpt2):
    before = sorted(path.name for path in gpt2.iterdir())
    save_run(tmp_path / "run", model(config("language", norm="layer", d=24, h=6, k=4, v=4)))
    for attempt in (
        lambda: import_model(gpt2, gpt2, overwrite=True),
        lambda: import_model(gpt2, gpt2.parent / "other", overwrite=True),
        lambda: convert(gpt2, gpt2, write_heads=1, overwrite=True),
        lambda: export_model(tmp_path / "run", gpt2, overwrite=True),
    ):
        shutil.copytree(gpt2, tmp_path / "other", dirs_exist_ok=True)
        with pytest.raises(
            RunError, match=r"is not (an exported model|a run) and is not overwritten"
        ):
            attempt()
    assert sorted(path.name for path in gpt2.iterdir()) == before
    assert sorted(path.name for path in (tmp_path / "other").iterdir()) == before
    export_model(tmp_path / "run", tmp_path / "out")
    export_model(tmp_path / "run", tmp_path / "out", overwrite=True)
    with pytest.raises(RunError, match="the model itself"):
        convert(tmp_path / "run", tmp_path / "run", write_heads=1, overwrite=True)


def test_a_stored_table_of_positions_must_be_the_formula(tmp_path):
    for name in ("marian", "m2m_100"):
        folder = tmp_path / name
        theirs = witnesses.saved(folder, name, dtype=torch.float32)
        kind = "weight" if name == "marian" else "weights"
        tables = {
            f"model.{side}.embed_positions.{kind}": getattr(
                getattr(theirs.model, side).embed_positions, kind
            )
            for side in ("encoder", "decoder")
        }
        file = folder / "model.safetensors"
        weights = load_file(file)
        tables = {one: T.detach().clone() for one, T in tables.items()}
        save_file({**weights, **tables}, file)
        import_model(folder, tmp_path / f"{name}-run")
        first = min(tables)
        tables[first][9, 3] += 0.3
        save_file({**weights, **tables}, file)
        with pytest.raises(RunError, match=f"{re.escape(first)} differs from the sinusoidal"):
            import_model(folder, tmp_path / "other")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_weights_of_other_dtypes_are_named(tmp_path, gpt2, dtype):
    file = gpt2 / "model.safetensors"
    weights = load_file(file)
    weights["transformer.h.1.mlp.c_fc.weight"] = weights["transformer.h.1.mlp.c_fc.weight"].to(
        dtype
    )
    save_file(weights, file)
    with pytest.raises(RunError, match=rf"transformer\.h\.1\.mlp\.c_fc\.weight has {dtype}"):
        import_model(gpt2, tmp_path / "run")


def test_an_export_names_the_dtype_of_its_weights(tmp_path, gpt2):
    file = gpt2 / "config.json"  # may name another dtype than that of the files
    file.write_text(json.dumps(json.loads(file.read_text()) | {"dtype": "bfloat16"}))
    import_model(gpt2, tmp_path / "same")
    export_model(tmp_path / "same", tmp_path / "back")
    assert (tmp_path / "back" / "config.json").read_bytes() == file.read_bytes()
    import_model(gpt2, tmp_path / "run", dtype=torch.float16)
    export_model(tmp_path / "run", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float16"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert theirs.dtype == torch.float16
    assert load_run(tmp_path / "out").model.dtype == torch.float16


@pytest.mark.parametrize("task", ["language", "translation"])
def test_transformers_finds_the_ids_of_our_tokenizer(tmp_path, task):
    ours = tokenizer()
    sizes = {"d": 24, "h": 6, "k": 4, "v": 4, "vocab_size": ours.vocab_size, "bias": True}
    changes = {"norm": "layer", "g": 6, "activation": "relu"}
    if task == "translation":
        changes |= {"positions": "sinusoidal", "norm_place": "post", "output_bias": True}
        changes |= {"logit_scale": 1.0, "norm_epsilon": 1e-5, "source_positions": 23}
    save_run(tmp_path / "run", model(config(task, **sizes, **changes)), tokenizer=ours)
    export_model(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out" / "tokenizer.model").exists()
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    lines = foreign_tokenizers.lines()
    frame = ours.frame()
    before, after = ((*ours.prompt_start,), ()) if task == "language" else frame[:2]
    expected = [[*before, *ids.tolist(), *after] for ids in ours.encode_all(lines)]
    assert theirs(lines).input_ids == expected
    again = load_tokenizer(tmp_path / "out")
    assert [ids.tolist() for ids in again.encode_all(lines)] == [
        ids.tolist() for ids in ours.encode_all(lines)
    ]
    for line in lines[:200]:
        ids = ours.encode(line)
        assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids)
        assert again.decode(ids) == ours.decode(ids)


def test_settings_that_are_not_applied_are_logged(tmp_path, gpt2, caplog):
    values = {"bad_words_ids": [[5], [6, 7]], "begin_suppress_tokens": [3], "num_beams": 4}
    (gpt2 / "generation_config.json").write_text(json.dumps(values))
    import_model(gpt2, tmp_path / "run")
    words = [re.sub(".*: ", "", record.getMessage()) for record in caplog.records]
    assert words == [
        "begin_suppress_tokens is not applied",
        "bad_words_ids of several tokens is not applied",
    ]
    assert load_tokenizer(tmp_path / "run").suppressed == (5,)


def test_typing_errors_are_answered_without_the_network(refused, monkeypatch, tmp_path):
    def no_network(*_: object, **__: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr("huggingface_hub.snapshot_download", no_network)
    assert "did you mean 'wmt14-small/multi-head'?" in refused("explain", "wmt14-smal/multi-head")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.chdir(tmp_path)
    error = refused("translate", "runs/ende", "--device=cpu")
    assert "there is no folder runs/ende; to download a model" in error
    assert "writehead[hub]" in error


def test_a_damaged_config_of_a_run_is_not_taken_for_one_of_hugging_face(tmp_path, gpt2, refused):
    import_model(gpt2, tmp_path / "run")
    (tmp_path / "run" / "config.json").write_text('{"format": 2, "model"')
    error = refused("generate", tmp_path / "run", "a")
    assert "config.json is not JSON" in error
    assert "Hugging Face" not in error
