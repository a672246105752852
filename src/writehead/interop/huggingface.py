"""Imports Hugging Face models as runs, and exports runs.

An imported run keeps the original config and the names of the original tensors in `original.json`,
so that exporting it restores the original. Buffers that the model computes are in
`original.safetensors`.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from writehead import __version__
from writehead.config import ModelConfig
from writehead.data.bpe import BPETokenizer
from writehead.data.tokenizer import (
    JSON_FILE,
    OWN_FILE,
    TOKENIZER_FILES,
    Files,
    load_tokenizer,
    read_tokenizer,
)
from writehead.errors import ConfigError, RunError, shown
from writehead.interop.ctranslate2 import Vocabulary, export_ctranslate2
from writehead.interop.families import (
    FORMATS,
    TO_CTRANSLATE2,
    TO_HUGGING_FACE,
    Described,
    Fields,
    read_exact,
)
from writehead.interop.fitting import fit
from writehead.interop.hub import find_folder
from writehead.interop.layout import Weights
from writehead.interop.pretrained import (
    dtype_name,
    generation_fields,
    import_source,
    is_pretrained,
    layout_of,
    load_run,
    read_pretrained,
)
from writehead.interop.tokenizer_json import tokenizer_json
from writehead.runs.folder import (
    CONFIG,
    ORIGINAL,
    WEIGHTS,
    check_different,
    check_place,
    read_model,
    run_directory,
    write_model,
    write_tensors,
)
from writehead.util.files import atomic_directory
from writehead.util.json_files import check_shape, parse_json, read_json

CTRANSLATE2_FILES = (
    *("model.bin", "shared_vocabulary.json", "source_vocabulary.json"),
    *("target_vocabulary.json", "vocabulary.json"),
)
EXPORTED_BY = "writehead"  # in the metadata of the weights
IMPORT_AGAIN = "import the model again"
ORIGINAL_SHAPE = {"config": str, "tensors": [str], "dtype": str}  # of original.json


def import_model(
    path_or_id: Path | str,
    output: Path | str,
    *,
    revision: str | None = None,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
) -> ModelConfig:
    """Writes a Hugging Face model (a folder or a hub name) as a run; returns its config.

    The weights keep their dtype unless another is given. `overwrite` replaces an existing run.
    """
    output = Path(output)
    check_place(output, overwrite)
    folder = find_folder(path_or_id, revision=revision)
    if not is_pretrained(folder):
        raise RunError(f"{folder} has no config.json of a Hugging Face model; check the path")
    check_different(output, folder)
    source = import_source(read_pretrained(folder, dtype=dtype))
    with run_directory(output, overwrite=overwrite) as fresh:
        write_model(fresh, source.config, source.weights, source.files)
    return source.config


def export_model(
    run: Path | str,
    output: Path | str,
    *,
    to: str = TO_HUGGING_FACE,
    quantization: str | None = None,
    overwrite: bool = False,
) -> None:
    """Writes a run as a folder that Hugging Face transformers or CTranslate2 loads.

    An imported model is written in its original format, with its current weights. Raises
    ConfigError with the reason if the library cannot express the model exactly.
    """
    output, folder = Path(output), find_folder(run)
    if to not in FORMATS:
        raise ConfigError(f"to={shown(to)} must be {TO_HUGGING_FACE!r} or {TO_CTRANSLATE2!r}")
    _check_output(output, overwrite)
    check_different(output, folder)
    if to == TO_CTRANSLATE2:
        _to_ctranslate2(folder, output, quantization or "float32", overwrite)
        return
    if quantization is not None:
        raise ConfigError("only an export to CTranslate2 can be quantized; leave quantization out")
    if is_pretrained(folder):
        raise RunError(f"{folder} is already a Hugging Face model; copy the folder")
    model = read_model(folder, mixed=True)
    text, tensors = _exported(folder, model.config, model.state_dict())
    try:
        with atomic_directory(output, replace=overwrite) as fresh:
            (fresh / CONFIG).write_text(text, encoding="utf-8")
            write_tensors(fresh / WEIGHTS, _own_memory(tensors), {EXPORTED_BY: __version__})
            for name, content in _their_tokenizer(folder, model.config).items():
                (fresh / name).write_bytes(content)
    except OSError as error:
        raise RunError(f"{output} could not be written: {error}") from error


def _to_ctranslate2(folder: Path, output: Path, quantization: str, overwrite: bool) -> None:
    run = load_run(folder, dtype=torch.float32)
    if run.tokenizer is None:
        raise RunError(f"{folder} has no tokenizer, which CTranslate2 needs; add its files")
    tokenizer = load_tokenizer(run.tokenizer)
    tokenizer.check_fits(run.model.config)
    export_ctranslate2(
        run.model,
        Vocabulary.of(tokenizer),
        output,
        quantization=quantization,
        # their tokenizers append eos themselves
        add_source_eos=isinstance(tokenizer, BPETokenizer),
        files=read_tokenizer(folder),
        overwrite=overwrite,
    )


def _exported(folder: Path, config: ModelConfig, weights: Weights) -> tuple[str, Weights]:
    """Returns the config.json and the tensors of a run in the format of Hugging Face."""
    original = _read_original(folder)
    data = {} if original is None else dict(original.fields.data)
    if original is not None:
        described = read_exact(original.fields, generation_fields(folder))
        described = replace(described, config=replace(described.config, tied=config.tied))
        if described.config == config:
            layout, file = layout_of(described), original.fields.file
            tensors = layout.restore(weights, original.tensors, original.computed, file)
            if (dtype := dtype_name(weights)) == original.dtype:
                return original.text, tensors
            names = [name for name in ("dtype", "torch_dtype") if name in data] or ["dtype"]
            return _text({**data, **dict.fromkeys(names, dtype)}), tensors
    fitted = fit(config, weights, data)
    described = Described(fitted.family, fitted.config, ())
    text = _text({**fitted.data, "dtype": dtype_name(fitted.weights)})
    return text, layout_of(described).to_theirs(fitted.weights)


class _Original(NamedTuple):
    """What `original.json` and `original.safetensors` of an imported run contain."""

    text: str
    fields: Fields
    tensors: list[str]
    dtype: str
    computed: Weights


def _read_original(folder: Path) -> _Original | None:
    """Reads the files; reading the run has verified their checksums."""
    file, buffers = (folder / name for name in ORIGINAL)
    if not file.is_file():
        return None
    content = read_json(file, ORIGINAL_SHAPE, RunError, IMPORT_AGAIN)
    text = content["config"]
    try:
        data = parse_json(text)
        check_shape(data, {"model_type": str})
        computed = load_file(buffers) if buffers.is_file() else {}
    except (SafetensorError, OSError) as error:
        raise RunError(f"{buffers} is damaged: {error}; {IMPORT_AGAIN}") from error
    except ValueError as error:
        raise RunError(f"{file}: its config is damaged: {error}; {IMPORT_AGAIN}") from error
    return _Original(text, Fields(file, data), content["tensors"], content["dtype"], computed)


def _their_tokenizer(folder: Path, config: ModelConfig) -> Files:
    """Returns tokenizer files that give the same ids in transformers."""
    files = read_tokenizer(folder)
    if OWN_FILE not in files or len(files.keys() & {OWN_FILE, JSON_FILE}) > 1:
        return files
    return tokenizer_json(BPETokenizer(files[OWN_FILE], str(folder / OWN_FILE)), config.task)


def _text(data: dict[str, Any]) -> str:
    return json.dumps(data, indent=2) + "\n"


def _check_output(output: Path, overwrite: bool) -> None:
    """Raises RunError unless `output` is free or, with `overwrite`, an exported model."""
    if not output.exists():
        return
    if not overwrite:
        raise RunError(f"{output} exists; choose another folder, or pass overwrite=True")
    known = {CONFIG, WEIGHTS, *TOKENIZER_FILES, *CTRANSLATE2_FILES}
    is_model = (output / CTRANSLATE2_FILES[0]).is_file() or _is_exported(output / WEIGHTS)
    if not is_model or {path.name for path in output.iterdir()} - known:
        raise RunError(f"{output} is not an exported model and is not overwritten; choose another")


def _is_exported(file: Path) -> bool:
    """Returns whether a file has weights that `export_model` wrote."""
    try:
        with safe_open(file, "pt") as tensors:
            return EXPORTED_BY in (tensors.metadata() or {})
    except (SafetensorError, OSError):
        return False


def _own_memory(tensors: Weights) -> dict[str, Tensor]:
    """Returns contiguous tensors that share no memory, as safetensors requires."""
    seen: set[int] = set()
    owned = {}
    for name, T in tensors.items():
        T = T.detach().cpu().contiguous()
        owned[name] = T.clone() if T.data_ptr() in seen else T
        seen.add(owned[name].data_ptr())
    return owned
