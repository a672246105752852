"""Run folders: a model on disk as `config.json`, `model.safetensors` and its tokenizer.

A run appears complete or not at all. `checksums.sha256` covers all files, and loading verifies
them. Reading a run executes no code from it. Matrices may be quantized; loading converts them to
floating point.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.overrides import TorchFunctionMode

from writehead import __version__
from writehead.config import ModelConfig, QuantizationConfig
from writehead.cost import check_config
from writehead.data.tokenizer import (
    TOKENIZER_FILES,
    Files,
    Tokenizer,
    has_tokenizer,
    read_tokenizer,
    tokenizer_files,
)
from writehead.errors import ConfigError, DamagedRun, RunError, nearest, one_line, shown
from writehead.model.layers import Stack
from writehead.model.transformer import LanguageModel, Transformer, TranslationModel, make_model
from writehead.runs.quantization import dequantize_tensors
from writehead.util.checksums import (
    CHECKSUMS,
    COPY_AGAIN,
    check_checksum,
    write_checksums,
)
from writehead.util.devices import find_device
from writehead.util.files import atomic_directory, hidden_directory, replaced_directory, sync
from writehead.util.json_files import read_json

FORMAT = 2
FORMAT_1_NAMES = {"vocabulary": "vocab_size", "start": "bos", "end": "eos"}
KEYS = ("format", "writehead", "model", "quantization")  # of config.json
CONFIG, WEIGHTS = "config.json", "model.safetensors"
PLAN = "train.json"  # of a training run
# what else the original format of an imported model contains
ORIGINAL = ("original.json", "original.safetensors")
FILES = {CONFIG, WEIGHTS, CHECKSUMS, *TOKENIZER_FILES, *ORIGINAL}


@dataclass(frozen=True)
class Run:
    """A loaded run: the model in evaluation mode, and the folder of its tokenizer, if any."""

    model: TranslationModel | LanguageModel
    tokenizer: Path | None
    is_quantized: bool = False  # on disk


class _SkipInit(TorchFunctionMode):
    """Skips random initialization, which would import PyTorch's compiler on the meta device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_):
            return kwargs["tensor"]
        return func(*args, **kwargs)


def save_run(
    directory: Path | str,
    model: Transformer,
    *,
    tokenizer: Tokenizer | Path | str | None = None,
    overwrite: bool = False,
) -> None:
    """Writes a complete run to `directory`; replaces an existing run only with `overwrite`.

    `tokenizer` may also be a folder with the files of a tokenizer, or a file of ours.
    """
    directory = Path(directory)
    check_place(directory, overwrite)
    with run_directory(directory, overwrite=overwrite) as fresh:
        write_model(fresh, model.config, model.state_dict(), _contents(tokenizer))


def load_run(
    directory: Path | str,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> Run:
    """Loads the run in `directory`."""
    model = read_model(directory, device=find_device(device), dtype=dtype, backend=backend)
    folder = Path(directory)
    is_quantized = read_quantization(folder) is not None
    return Run(model.eval(), folder if has_tokenizer(folder) else None, is_quantized)


def check_place(directory: Path, overwrite: bool) -> None:
    """Raises RunError unless `directory` is free or, with `overwrite`, contains only a run."""
    if not directory.exists():
        return
    if not overwrite:
        raise RunError(f"{directory} exists; choose another folder, or pass overwrite=True")
    is_run = _has_format(directory / CONFIG)
    if not is_run or {path.name for path in directory.iterdir()} - FILES:
        reason = "contains more than a run" if is_run else "is not a run"
        raise RunError(f"{directory} {reason} and is not overwritten; choose another folder")


def _has_format(file: Path) -> bool:
    """Returns whether a file is the config.json of a run, not of another library."""
    try:
        read_json(file, {"format": int}, RunError)
    except RunError:
        return False
    return True


def check_different(output: Path, folder: Path) -> None:
    """Raises RunError if a result would replace the model that it is made from."""
    if output.exists() and output.samefile(folder):
        raise RunError(f"{output} is the model itself; choose another folder for the result")


@contextmanager
def run_directory(directory: Path, *, overwrite: bool) -> Iterator[Path]:
    """Creates a folder that becomes the run in `directory`, with checksums, if the block succeeds.

    Raises RunError if, without `overwrite`, another process has written one in the meantime.
    """
    with _write_errors(directory), atomic_directory(directory, replace=overwrite) as fresh:
        yield fresh
        write_checksums(fresh)


def finish_run(
    directory: Path, config: ModelConfig, weights: dict[str, torch.Tensor], tokenizer: Files
) -> None:
    """Writes a run into a folder that may contain other files."""
    with _write_errors(directory), hidden_directory(directory / ".finished") as fresh:
        write_model(fresh, config, weights, tokenizer)
        write_checksums(fresh)
        for path in fresh.iterdir():
            sync(path)
        (directory / CHECKSUMS).unlink(missing_ok=True)  # they do not match the new files
        for name in (*tokenizer, WEIGHTS, CHECKSUMS, CONFIG):  # config.json, last, makes it a run
            os.replace(fresh / name, directory / name)
        sync(directory)


def write_model(
    directory: Path,
    config: ModelConfig,
    weights: dict[str, torch.Tensor],
    files: Files,
    quantization: QuantizationConfig | None = None,
) -> None:
    """Writes the config, the weights and other files, such as the tokenizer's, to a folder."""
    data = {"format": FORMAT, "writehead": __version__, "model": config.to_json()}
    if quantization is not None:
        data["quantization"] = quantization.to_json()
    (directory / CONFIG).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    tensors = {name: T.detach().cpu().contiguous() for name, T in weights.items()}
    write_tensors(directory / WEIGHTS, tensors)
    for name, content in files.items():
        (directory / name).write_bytes(content)


def write_tensors(
    file: Path, tensors: dict[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes contiguous tensors on the CPU."""
    save_file(tensors, file, metadata={"format": "pt", **(metadata or {})})
    file.chmod(0o644)  # safetensors makes it readable only by its owner


def _contents(tokenizer: Tokenizer | Path | str | None) -> Files:
    """Returns the files of a tokenizer to write to a run."""
    if tokenizer is None or isinstance(tokenizer, Tokenizer):
        return {} if tokenizer is None else tokenizer.files
    if not (files := read_tokenizer(Path(tokenizer))):
        raise RunError(f"{tokenizer} has no tokenizer; pass the folder or the file of one")
    return files


def kept_files(directory: Path) -> Files:
    """Returns the files of a run that do not depend on its weights."""
    paths = [directory / name for name in ORIGINAL]
    original = {path.name: path.read_bytes() for path in paths if path.is_file()}
    return {**read_tokenizer(directory), **original}


@contextmanager
def _write_errors(directory: Path) -> Iterator[None]:
    """Converts file system errors to RunError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        if isinstance(error, FileExistsError) and directory.exists():
            raise RunError(
                f"another process has written {directory} in the meantime; choose another folder"
            ) from error
        raise RunError(f"{directory} could not be written: {error}") from error


def read_config(directory: Path | str) -> ModelConfig:
    """Reads the model config of a run."""
    return _read_configs(directory)[0]


def read_quantization(directory: Path | str) -> QuantizationConfig | None:
    """Reads the quantization config of a run; returns None if it is not quantized."""
    return _read_configs(directory)[1]


def _read_configs(directory: Path | str) -> tuple[ModelConfig, QuantizationConfig | None]:
    path = _require(Path(directory) / CONFIG)
    data = read_json(path, {"format": range(1, 1 << 31), "model": dict}, RunError, COPY_AGAIN)
    for name in data.keys() - KEYS:
        raise RunError(f"{path} has an unknown key {shown(name)}; {nearest(name, KEYS)}")
    if data["format"] > FORMAT:
        raise RunError(f"{path} has format {data['format']}; install a newer writehead to read it")
    fields = data["model"]
    if data["format"] == 1:
        fields = {FORMAT_1_NAMES.get(name, name): value for name, value in fields.items()}
    try:
        model, stored = ModelConfig.from_json(fields), data.get("quantization")
        check_config(model)
        return model, None if stored is None else QuantizationConfig.from_json(stored)
    except ConfigError as error:
        raise RunError(f"{path}: {error}") from error


def _require(path: Path) -> Path:
    """Returns the path of a file in a run; raises RunError if it does not exist."""
    if path.is_file():
        return path
    directory, old = path.parent, replaced_directory(path.parent)
    if old is not None:
        raise RunError(f"a writer of {directory} was killed; the run is now {old}: move it back")
    if not directory.is_dir():
        raise RunError(f"there is no run at {directory}; check the path")
    inside = sorted([*directory.glob(f"*/{CONFIG}"), *directory.glob(f"*/*/{CONFIG}")])
    if (directory / PLAN).is_file():
        hint = f", or use its checkpoint {inside[-1].parent}" if inside else ""
        raise RunError(
            f"the training of {directory} has not finished; run the same command again to resume "
            f"it{hint}"
        )
    hint = f"it contains one: {inside[-1].parent}" if inside else "check the path"
    raise RunError(f"{directory} is not a run: it has no {path.name}; {hint}")


def read_model(
    directory: Path | str,
    config: ModelConfig | None = None,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    backend: str = "auto",
    mixed: bool = False,
) -> TranslationModel | LanguageModel:
    """Reads the model of a run, as one of `config` if it is given; verifies all checksums.

    The weights must have one dtype, unless `mixed` is true.
    """
    own, quantization = _read_configs(directory)
    path = _require(Path(directory) / WEIGHTS)
    model = empty_model(config or own, backend)
    try:
        tensors = load_file(path, device=str(device))
        if quantization is not None:
            shapes = {name: W.shape for name, W in model.state_dict().items()}
            tensors = dequantize_tensors(tensors, shapes, quantization)
        fill_model(model, tensors, dtype, None if mixed else path)
    except (SafetensorError, OSError) as error:
        raise DamagedRun(f"{path} is damaged or truncated: {error}", COPY_AGAIN) from error
    except (RuntimeError, ValueError) as error:
        if isinstance(error, RunError):
            raise
        reason = " ".join(str(error).split())
        raise RunError(f"{path} does not match its config: {one_line(reason, 300)}") from error
    original = [path.with_name(name) for name in ORIGINAL]  # a missing one is not checked
    for file in (path, path.with_name(CONFIG), *tokenizer_files(path.parent), *original):
        check_checksum(file)
    return model


def empty_model(config: ModelConfig, backend: str = "auto") -> TranslationModel | LanguageModel:
    """Returns a model whose weights have names and shapes, but no memory."""
    with torch.device("meta"), _SkipInit():
        return make_model(config, backend)


def fill_model(
    model: Transformer,
    tensors: Mapping[str, torch.Tensor],
    dtype: torch.dtype | None,
    origin: Path | None,
) -> None:
    """Gives an empty model its weights, by default in their own dtype.

    Raises RunError, which names `origin`, unless all have one dtype or `origin` is None.
    """
    weights = {name: T if dtype is None else T.to(dtype) for name, T in tensors.items()}
    model.load_state_dict(weights, assign=True)  # checks names and shapes
    if origin is not None and len({T.dtype for T in weights.values()}) > 1:
        raise RunError(f"{origin} has weights of several dtypes; pass the dtype to load them in")
    for stack in model.modules():
        if isinstance(stack, Stack):
            stack.compute_table(model.device)
