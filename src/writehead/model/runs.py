"""Run directories: a model on disk as `config.json`, `model.safetensors` and its tokenizer.

A run is written under a hidden name and renamed, so a run is always complete. `checksums.sha256`
covers all three files, and loading verifies them. Weights are safetensors and the config is JSON,
so reading a run executes no code from it. Matrices may be stored in few bits; loading converts them
to floating point.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from torch.overrides import TorchFunctionMode

from writehead import __version__
from writehead.config import ModelConfig, QuantizationConfig
from writehead.errors import ConfigError, DamagedRun, RunError, nearest, shown
from writehead.model.bits import (
    INTEGERS,
    SCALES,
    damage,
    dequantize,
    is_quantized,
    stored_shapes,
    unpack,
)
from writehead.model.checksum import CHECKSUMS, check_checksum, sha256, write_checksums
from writehead.model.language import LanguageModel
from writehead.model.transformer import Transformer, check_config
from writehead.model.translation import TranslationModel
from writehead.util.files import atomic_directory, hidden_directory, replaced_directory, sync
from writehead.util.json_files import read_json

FORMAT = 2
FORMAT_1_NAMES = {"vocabulary": "vocab_size", "start": "bos", "end": "eos"}
CHECKPOINTS = "checkpoints"  # of a run in training: a folder of runs
CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.model"
OLD_CHECKSUM = f"{WEIGHTS}.sha256"  # of runs that older versions wrote
FILES = {CONFIG, WEIGHTS, TOKENIZER, CHECKSUMS, OLD_CHECKSUM}


@dataclass(frozen=True)
class Run:
    """A loaded run: the model, ready to decode, and its tokenizer's file where it has one."""

    model: TranslationModel | LanguageModel
    tokenizer: Path | None


def make_model(config: ModelConfig, backend: str = "auto") -> TranslationModel | LanguageModel:
    """The model that a config describes, with fresh weights."""
    check_config(config)
    kind = TranslationModel if config.task == "translation" else LanguageModel
    return kind(config, backend)


def make_bare_model(config: ModelConfig, backend: str = "auto") -> TranslationModel | LanguageModel:
    """The model that a config describes, with names and shapes but no memory: to be filled."""
    with torch.device("meta"), _Undrawn():
        return make_model(config, backend)


class _Undrawn(TorchFunctionMode):
    """Draws no weights: where they have no memory, drawing them imports PyTorch's compiler."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in (nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_):
            return kwargs["tensor"]
        return func(*args, **kwargs)


def save_run(
    directory: Path | str,
    model: Transformer,
    *,
    tokenizer: Path | str | None = None,
    overwrite: bool = False,
) -> None:
    """Writes a complete run at `directory`, or nothing; replaces a run only with `overwrite`."""
    directory = Path(directory)
    check_place(directory, overwrite)
    with run_directory(directory, overwrite=overwrite) as fresh:
        write_model(fresh, model.config, model.state_dict())
        if tokenizer is not None:
            copy_tokenizer(Path(tokenizer), fresh)


def check_place(directory: Path, overwrite: bool) -> None:
    """Raises where a run cannot go to `directory`: it exists, or what is there is no run alone."""
    if directory.exists() and not overwrite:
        raise RunError(f"{directory} exists; choose another place, or pass overwrite=True")
    if directory.exists() and not (directory / CONFIG).is_file():
        raise RunError(f"{directory} is not a run, so it is not overwritten; choose another place")
    if directory.is_dir():
        others = {path.name for path in directory.iterdir()} - FILES
        if others:
            raise RunError(
                f"{directory} holds more than a run ({', '.join(sorted(others)[:3])}), which "
                f"overwriting would delete; choose another place"
            )


def finish_run(
    directory: Path, config: ModelConfig, weights: dict[str, torch.Tensor], tokenizer: bytes
) -> None:
    """Puts a run into a folder that holds other things too, such as its checkpoints."""
    with _explained(directory), hidden_directory(directory / ".finished") as fresh:
        write_model(fresh, config, weights)
        (fresh / TOKENIZER).write_bytes(tokenizer)
        write_checksums(fresh)
        for path in fresh.iterdir():
            sync(path)
        for name in (CHECKSUMS, OLD_CHECKSUM):  # first, so that none belongs to other weights
            (directory / name).unlink(missing_ok=True)
        for name in (TOKENIZER, WEIGHTS, CHECKSUMS, CONFIG):  # the config last: it makes a run
            os.replace(fresh / name, directory / name)
        sync(directory)


@contextmanager
def run_directory(directory: Path, *, overwrite: bool) -> Iterator[Path]:
    """Creates a folder that becomes the run at `directory` when the block ends without an error.

    At the end of the block, writes the checksums of its files. Raises RunError if the run cannot be
    written or, without `overwrite`, if another process has written one in the meantime.
    """
    with _explained(directory), atomic_directory(directory, replace=overwrite) as fresh:
        yield fresh
        write_checksums(fresh)


@contextmanager
def _explained(directory: Path) -> Iterator[None]:
    """Makes errors in writing a run name the run, not its temporary files."""
    try:
        yield
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        reason = os.strerror(int(number[1])) if number else str(error)
        raise RunError(f"{directory} could not be written: {reason}") from error
    except FileExistsError as error:
        if directory.exists():
            raise RunError(
                f"another process has written {directory} in the meantime, and it is kept; choose "
                f"another folder"
            ) from error
        raise RunError(f"{directory} could not be written: its parent is not a folder") from error
    except OSError as error:
        raise RunError(f"{directory} could not be written: {error.strerror or error}") from error


def copy_tokenizer(tokenizer: Path, directory: Path) -> None:
    """Copies a tokenizer's file into a run that is being written."""
    try:
        content = tokenizer.read_bytes()
    except OSError as error:
        raise RunError(
            f"the run could not be written: {tokenizer} cannot be read: {error.strerror}"
        ) from error
    (directory / TOKENIZER).write_bytes(content)


def write_model(
    directory: Path,
    config: ModelConfig,
    weights: dict[str, torch.Tensor],
    quantization: QuantizationConfig | None = None,
) -> None:
    """Puts config and weights into a folder, which is not a run until it is moved to its place."""
    data = {"format": FORMAT, "writehead": __version__, "model": config.to_json()}
    if quantization is not None:
        data["quantization"] = quantization.to_json()
    (directory / CONFIG).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    tensors = {name: T.detach().cpu().contiguous() for name, T in weights.items()}
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    (directory / WEIGHTS).chmod(0o644)  # safetensors makes it private


def load_run(
    directory: Path | str,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> Run:
    """Reads the run at `directory`; the model is in evaluation mode."""
    directory = Path(directory)
    config = read_config(directory)
    _check_device(device)
    model = make_bare_model(config, backend)
    weights = read_weights(directory, model, device=device, dtype=dtype)
    model.load_state_dict(weights, assign=True)
    tokenizer = directory / TOKENIZER
    return Run(model.eval(), tokenizer if tokenizer.is_file() else None)


def read_config(directory: Path | str) -> ModelConfig:
    """The config of the run at `directory`."""
    return _read_configs(Path(directory) / CONFIG)[0]


def read_quantization(directory: Path | str) -> QuantizationConfig | None:
    """How the run at `directory` stores its matrices, or None where they are plain numbers."""
    return _read_configs(Path(directory) / CONFIG)[1]


def run_bytes(directory: Path) -> int:
    """Bytes of config, weights and tokenizer of a run, whatever else is in its folder."""
    paths = (directory / name for name in (CONFIG, WEIGHTS, TOKENIZER))
    return sum(path.stat().st_size for path in paths if path.is_file())


def run_fingerprint(directory: Path) -> str:
    """What tells the weights of two runs apart: sixteen digits of the SHA-256 of their file."""
    return sha256(directory / WEIGHTS)[:16]


def _read_configs(path: Path) -> tuple[ModelConfig, QuantizationConfig | None]:
    _require(path)
    shape = {"format": object, "model": dict}
    data = read_json(path, shape, RunError, "copy or save the run again")
    known = ("format", "writehead", "model", "quantization")
    for name in data:
        if name not in known:
            raise RunError(f"{path} has an unknown key {shown(name)}; {nearest(name, known)}")
    if type(data["format"]) is not int or data["format"] < 1:
        found = shown(data["format"])
        raise RunError(
            f"{path} has format {found}, but this writehead reads format {FORMAT}; copy or save "
            f"the run again"
        )
    if data["format"] > FORMAT:
        raise RunError(
            f"{path} has format {shown(data['format'])} (written by writehead "
            f"{shown(data.get('writehead'))}), but this is writehead {__version__}, which reads "
            f"up to format {FORMAT}; install a newer version"
        )
    fields = data["model"]
    if data["format"] == 1:
        fields = {FORMAT_1_NAMES.get(name, name): value for name, value in fields.items()}
    try:
        model = ModelConfig.from_json(fields)
        check_config(model)
        if "quantization" not in data:
            return model, None
        return model, QuantizationConfig.from_json(data["quantization"])
    except ConfigError as error:
        raise RunError(f"{path}: {error}") from error


def _check_device(device: torch.device | str) -> None:
    """Raises unless a tensor can be put on `device`."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device {str(device)!r} cannot be used ({reason}); try 'cpu'") from error


def _require(path: Path) -> None:
    directory = path.parent
    if path.is_file():
        return
    old = replaced_directory(directory)
    if old is not None:
        raise RunError(
            f"a process was killed while it replaced {directory}; the previous run is now "
            f"{old}: move it back"
        )
    if not directory.is_dir():
        raise RunError(f"there is no run at {directory}; check the path")
    if (directory / "dataset.json").is_file():  # which a room above this one writes
        raise RunError(f"{directory} is a dataset, not a run; `writehead train` makes a run of it")
    checkpoints = sorted((directory / CHECKPOINTS).glob("step-*"))
    if checkpoints and path.name == CONFIG:
        raise RunError(
            f"{directory} has not finished training; train on, or load its last checkpoint, which "
            f"is a run too: {checkpoints[-1]}"
        )
    inside = sorted(
        place.parent for depth in ("*", "*/*") for place in directory.glob(f"{depth}/{CONFIG}")
    )
    if inside and path.name == CONFIG:
        raise RunError(f"{directory} is no run; there is one inside it: {inside[-1]}")
    raise RunError(f"{directory} has no {path.name}, so it is no complete run; save it again")


def read_weights(
    directory: Path,
    model: Transformer,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> dict[str, torch.Tensor]:
    """Reads the run's tensors, whose names and shapes must be the model's.

    Also verifies the checksums of the config and the tokenizer.
    """
    path = directory / WEIGHTS
    _require(path)
    quantization = read_quantization(directory)
    if quantization is not None and dtype is None:
        dtype = torch.float32
    shapes = {name: T.shape for name, T in model.state_dict().items()}
    weights: dict[str, torch.Tensor] = {}
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            _check_names(path, set(file.keys()), shapes, quantization)
            for name, shape in shapes.items():
                if quantization is not None and is_quantized(shape):
                    weight = _read_matrix(file, path, name, shape, quantization)
                else:
                    weight = _read_tensor(file, path, name, list(shape))
                weights[name] = weight if dtype is None else weight.to(dtype)
        _check_dtypes(path, weights)
        for name in (WEIGHTS, CONFIG, TOKENIZER):  # last: an error that names a tensor says more
            check_checksum(directory / name)
    except (SafetensorError, OSError) as error:
        raise DamagedRun(
            f"{path} is damaged or cut short: {error}", "copy or save the run again"
        ) from error
    return weights


def _check_dtypes(path: Path, weights: dict[str, torch.Tensor]) -> None:
    dtypes = sorted({str(weight.dtype) for weight in weights.values()})
    if len(dtypes) > 1:
        raise RunError(f"{path} mixes {' and '.join(dtypes)}; give the dtype to load it in")


def _check_names(
    path: Path,
    names: set[str],
    shapes: dict[str, torch.Size],
    quantization: QuantizationConfig | None,
) -> None:
    """Raises unless the file's tensors are those that the config asks for."""
    expected = [
        name + part
        for name, shape in shapes.items()
        for part in ((INTEGERS, SCALES) if quantization and is_quantized(shape) else ("",))
    ]
    for name in sorted(names.difference(expected)):
        raise RunError(f"{path} has an unknown tensor {shown(name)}; {nearest(name, expected)}")
    for name in expected:
        if name not in names:
            raise RunError(f"{path} lacks the tensor {name!r} that its config asks for")


def _read_tensor(
    file: Any, path: Path, name: str, shape: list[int], dtype: torch.dtype | None = None
) -> torch.Tensor:
    """One tensor of the file, which must have that shape and dtype, or be floating-point."""
    found = list(file.get_slice(name).get_shape())
    if found != shape:
        raise RunError(f"{path}: {name!r} has shape {found}, and its config asks for {shape}")
    tensor: torch.Tensor = file.get_tensor(name)
    if dtype is None and not tensor.is_floating_point():
        raise RunError(f"{path}: {name!r} is {tensor.dtype}; weights are floating-point numbers")
    if dtype not in (None, tensor.dtype):
        raise RunError(f"{path}: {name!r} is {tensor.dtype}, and its config asks for {dtype}")
    return tensor


def _read_matrix(
    file: Any, path: Path, name: str, shape: torch.Size, quantization: QuantizationConfig
) -> torch.Tensor:
    """One matrix that is stored in few bits, as float32."""
    packed_shape, scales_shape = stored_shapes(shape, quantization)
    packed = _read_tensor(file, path, name + INTEGERS, packed_shape, torch.uint8)
    scales = _read_tensor(file, path, name + SCALES, scales_shape, torch.float16)
    codes = unpack(packed, quantization.bits, shape[1])
    wrong = damage(codes, scales)
    if wrong is not None:
        raise RunError(f"{path}: {name!r} {wrong}; copy or quantize the run again")
    return dequantize(codes, scales, quantization)
