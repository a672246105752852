"""Hugging Face models in and out: reads their folders, imports them as runs, and exports runs.

An imported run keeps the original config and the names of the original tensors in `original.json`,
so that exporting it gives the original back. Buffers that the model computes are in
`original.safetensors`.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file, save, save_file
from torch import Tensor

from writehead.config import ModelConfig
from writehead.data.bpe import BPETokenizer
from writehead.data.tokenizer import TOKENIZER_FILES, load_tokenizer, read_tokenizer
from writehead.errors import ConfigError, RunError, shown
from writehead.interop.ctranslate2 import export_ctranslate2
from writehead.interop.families import Described, read_values
from writehead.interop.fitting import fit
from writehead.interop.hub import find_folder
from writehead.interop.layout import Weights
from writehead.interop.pretrained import (
    generation_values,
    is_pretrained,
    layout_of,
    load_run,
    read_pretrained,
)
from writehead.runs.folder import (
    CONFIG,
    ORIGINAL,
    WEIGHTS,
    check_place,
    read_model,
    run_directory,
    write_model,
)
from writehead.util.files import atomic_directory
from writehead.util.json_files import parse_json, read_json

TO_HUGGING_FACE, TO_CTRANSLATE2 = "huggingface", "ctranslate2"
CTRANSLATE2_FILES = (
    *("model.bin", "shared_vocabulary.json", "source_vocabulary.json"),
    *("target_vocabulary.json", "vocabulary.json"),
)
ORIGINAL_SHAPE = {"config": str, "tensors": [str]}  # of original.json


def import_model(
    path_or_id: Path | str,
    output: Path | str,
    *,
    revision: str | None = None,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
) -> ModelConfig:
    """Writes a Hugging Face model, a folder or a name on the hub, as a run; returns its config.

    The weights keep their dtype unless another is given. `overwrite` replaces an existing run.
    """
    output = Path(output)
    check_place(output, overwrite)
    folder = find_folder(path_or_id, revision=revision)
    if not is_pretrained(folder):
        raise RunError(f"{folder} has no config.json of a Hugging Face model; check the path")
    pretrained = read_pretrained(folder, dtype=dtype)
    original = {
        "config": (folder / CONFIG).read_text(encoding="utf-8"),
        "tensors": list(pretrained.tensors),
    }
    files = {**read_tokenizer(folder), ORIGINAL[0]: json.dumps(original, indent=1).encode()}
    if pretrained.computed:
        files[ORIGINAL[1]] = save(pretrained.computed)
    with run_directory(output, overwrite=overwrite) as fresh:
        write_model(fresh, pretrained.config, pretrained.weights, files)
    return pretrained.config


@contextmanager
def as_run(run: Path | str) -> Iterator[Path]:
    """Yields the folder of a run; a Hugging Face model becomes one while the block runs."""
    folder = find_folder(run)
    if not is_pretrained(folder):
        yield folder
        return
    with TemporaryDirectory(prefix="writehead-") as place:
        imported = Path(place) / "run"
        import_model(folder, imported)
        yield imported


def export_model(
    run: Path | str,
    output: Path | str,
    *,
    to: str = TO_HUGGING_FACE,
    quantization: str | None = None,
    overwrite: bool = False,
) -> None:
    """Writes a run as a folder that Hugging Face transformers or CTranslate2 loads.

    An imported model is given back as it came, with its current weights. Raises ConfigError, which
    names the reason, if the other side cannot express the model exactly.
    """
    output, folder = Path(output), find_folder(run)
    if to not in (TO_HUGGING_FACE, TO_CTRANSLATE2):
        raise ConfigError(f"to={shown(to)} must be {TO_HUGGING_FACE!r} or {TO_CTRANSLATE2!r}")
    _check_output(output, overwrite)
    if output.exists() and output.samefile(folder):
        raise RunError(f"{output} is the model to export; choose another folder for the result")
    if to == TO_CTRANSLATE2:
        _to_ctranslate2(folder, output, quantization or "float32", overwrite)
        return
    if quantization is not None:
        raise ConfigError("only an export to CTranslate2 is quantized; leave quantization out")
    if is_pretrained(folder):
        raise RunError(f"{folder} is a Hugging Face model already; copy the folder")
    model = read_model(folder, mixed=True)
    text, tensors = _exported(folder, model.config, model.state_dict())
    try:
        with atomic_directory(output, replace=overwrite) as fresh:
            (fresh / CONFIG).write_text(text, encoding="utf-8")
            save_file(_own_memory(tensors), fresh / WEIGHTS, metadata={"format": "pt"})
            (fresh / WEIGHTS).chmod(0o644)  # safetensors makes it private
            for name, content in read_tokenizer(folder).items():
                (fresh / name).write_bytes(content)
    except OSError as error:
        raise RunError(f"{output} could not be written: {error}") from error


def _to_ctranslate2(folder: Path, output: Path, quantization: str, overwrite: bool) -> None:
    run = load_run(folder, dtype=torch.float32)
    if run.tokenizer is None:
        raise RunError(f"{folder} has no tokenizer, whose tokens CTranslate2 needs; add its files")
    tokenizer = load_tokenizer(run.tokenizer)
    target = tokenizer.target
    export_ctranslate2(
        run.model,
        target.pieces,
        output,
        source_tokens=None if target is tokenizer else tokenizer.pieces,
        quantization=quantization,
        unknown=target.unknown,
        suppressed=tokenizer.suppressed,
        # their tokenizers append eos themselves
        add_source_eos=isinstance(tokenizer, BPETokenizer),
        files=read_tokenizer(folder),
        overwrite=overwrite,
    )


def _exported(folder: Path, config: ModelConfig, weights: Weights) -> tuple[str, Weights]:
    """Returns the config.json and the tensors of a run in the format of Hugging Face."""
    file, data = folder / ORIGINAL[0], {}
    if file.is_file():
        original = read_json(file, ORIGINAL_SHAPE, RunError, "import it again")
        data = parse_json(original["config"])
        described = read_values(file, data, generation_values(folder))
        described = replace(described, config=replace(described.config, tied=config.tied))
        if described.config == config:
            made = layout_of(described).to_theirs(weights, original["tensors"])
            if (folder / ORIGINAL[1]).is_file():
                made |= load_file(folder / ORIGINAL[1])
            return original["config"], {name: made[name] for name in original["tensors"]}
    fitted = fit(config, weights, data)
    dtype = str(fitted.weights["tokens.weight"].dtype).removeprefix("torch.")
    text = json.dumps({**fitted.data, "dtype": dtype}, indent=2) + "\n"
    described = Described(fitted.family, fitted.config, ())
    return text, layout_of(described).to_theirs(fitted.weights)


def _check_output(output: Path, overwrite: bool) -> None:
    """Raises RunError unless `output` is free or, with `overwrite`, an exported model."""
    if not output.exists():
        return
    if not overwrite:
        raise RunError(f"{output} exists; choose another folder, or pass overwrite=True")
    known = {CONFIG, WEIGHTS, *TOKENIZER_FILES, *CTRANSLATE2_FILES}
    is_model = (output / CTRANSLATE2_FILES[0]).is_file() or is_pretrained(output)
    if not is_model or {path.name for path in output.iterdir()} - known:
        raise RunError(f"{output} is not an exported model and is not overwritten; choose another")


def _own_memory(tensors: Weights) -> dict[str, Tensor]:
    """Returns contiguous tensors that share no memory, as safetensors requires."""
    seen: set[int] = set()
    owned = {}
    for name, T in tensors.items():
        T = T.detach().cpu().contiguous()
        owned[name] = T.clone() if T.data_ptr() in seen else T
        seen.add(owned[name].data_ptr())
    return owned
