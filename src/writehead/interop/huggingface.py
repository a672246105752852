"""Hugging Face models in and out: reads their folders, imports them as runs, and exports runs.

An imported run keeps the original config and the names of the original tensors in `original.json`,
so that exporting it gives the original back. Buffers that the model computes are in
`original.safetensors`.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save, save_file
from torch import Tensor

from writehead import runs
from writehead.config import ModelConfig
from writehead.data.tokenizer import TOKENIZER_FILES, has_tokenizer, read_tokenizer
from writehead.errors import ConfigError, RunError, shown
from writehead.interop.families import Described, find_config, read_exact, read_values
from writehead.interop.fitting import fit
from writehead.interop.hub import find_folder
from writehead.interop.layout import Layout, Weights
from writehead.runs import Run
from writehead.runs.folder import (
    CONFIG,
    ORIGINAL,
    WEIGHTS,
    check_place,
    empty_model,
    fill_model,
    read_model,
    run_directory,
    write_model,
)
from writehead.util.devices import find_device
from writehead.util.files import atomic_directory
from writehead.util.json_files import parse_json, read_json

INDEX, PICKLED = "model.safetensors.index.json", ("pytorch_model*.bin", "*.pt", "*.pth")
GENERATION = "generation_config.json"
DOWNLOAD_AGAIN = "download or copy the folder again"
TO_HUGGING_FACE, TO_CTRANSLATE2 = "huggingface", "ctranslate2"
ORIGINAL_SHAPE = {"config": str, "tensors": [str]}  # of original.json


@dataclass(frozen=True)
class Pretrained:
    """A Hugging Face model: its weights under our names, and what its own format has besides."""

    described: Described
    weights: Weights
    folder: Path
    tensors: tuple[str, ...]  # names in their files
    computed: Weights = field(default_factory=dict)  # buffers that the model computes

    @property
    def config(self) -> ModelConfig:
        """The config of the model."""
        return self.described.config


def is_pretrained(folder: Path) -> bool:
    """Returns whether a folder holds a Hugging Face model, not a run."""
    return folder.is_dir() and find_config(folder) is not None


def read_pretrained(
    folder: Path | str, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> Pretrained:
    """Reads the folder of a Hugging Face model, by default in the dtype of its files."""
    folder = Path(folder)
    described = _describe(folder)
    tensors = _read_tensors(folder, torch.device(device))
    layout = _layout(described)
    weights = layout.to_ours(tensors, folder)
    if dtype is not None:
        weights = {name: W.to(dtype) for name, W in weights.items()}
    is_computed = described.family.is_computed
    computed = {name: T for name, T in tensors.items() if is_computed(layout.full_name(name))}
    return Pretrained(described, weights, folder, tuple(tensors), computed)


def load_run(
    run: Path | str,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> Run:
    """Loads a run, the folder of a Hugging Face model, or a model on the hub."""
    folder, place = find_folder(run), find_device(device)
    if not is_pretrained(folder):
        return runs.load_run(folder, device=place, dtype=dtype, backend=backend)
    pretrained = read_pretrained(folder, device=place, dtype=dtype)
    model = empty_model(pretrained.config, backend)
    fill_model(model, pretrained.weights, dtype, folder)
    return Run(model.eval(), folder if has_tokenizer(folder) else None)


def read_config(run: Path | str) -> ModelConfig:
    """Reads the config of a run, the folder of a Hugging Face model, or a model on the hub."""
    folder = find_folder(run)
    return _describe(folder).config if is_pretrained(folder) else runs.read_config(folder)


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
    if to == TO_CTRANSLATE2:
        raise ConfigError("not yet")
    if to != TO_HUGGING_FACE:
        raise ConfigError(f"to={shown(to)} must be {TO_HUGGING_FACE!r} or {TO_CTRANSLATE2!r}")
    if quantization is not None:
        raise ConfigError("quantization is for CTranslate2; Hugging Face gets the run's dtype")
    if is_pretrained(folder):
        raise RunError(f"{folder} is a Hugging Face model already; copy it")
    _check_output(output, overwrite)
    model = read_model(folder)
    text, tensors = _exported(folder, model.config, model.state_dict())
    with atomic_directory(output, replace=overwrite) as fresh:
        (fresh / CONFIG).write_text(text, encoding="utf-8")
        save_file(_own_memory(tensors), fresh / WEIGHTS, metadata={"format": "pt"})
        (fresh / WEIGHTS).chmod(0o644)  # safetensors makes it private
        for name, content in read_tokenizer(folder).items():
            (fresh / name).write_bytes(content)


def _exported(folder: Path, config: ModelConfig, weights: Weights) -> tuple[str, Weights]:
    """Returns the config.json and the tensors of a run in the format of Hugging Face."""
    file, data = folder / ORIGINAL[0], {}
    if file.is_file():
        original = read_json(file, ORIGINAL_SHAPE, RunError, "import it again")
        data = parse_json(original["config"])
        described = read_values(file, data, _generation(folder))
        if described.config == config:
            made = _layout(described).to_theirs(weights, original["tensors"])
            if (folder / ORIGINAL[1]).is_file():
                made |= load_file(folder / ORIGINAL[1])
            return original["config"], {name: made[name] for name in original["tensors"]}
    fitted = fit(config, weights, data)
    dtype = str(next(iter(fitted.weights.values())).dtype).removeprefix("torch.")
    text = json.dumps({**fitted.data, "dtype": dtype}, indent=2) + "\n"
    described = Described(fitted.family, fitted.config, ())
    return text, _layout(described).to_theirs(fitted.weights)


def _describe(folder: Path) -> Described:
    return read_exact(folder / CONFIG, _generation(folder))


def _generation(folder: Path) -> dict[str, Any]:
    """Returns the values of generation_config.json, which not every model has."""
    file = folder / GENERATION
    values: dict[str, Any] = read_json(file, dict, RunError) if file.is_file() else {}
    return values


def _layout(described: Described) -> Layout:
    family = described.family
    assert family.entries is not None
    model = empty_model(described.config)
    return Layout.of(family, family.entries(described.config), model.state_dict())


def _read_tensors(folder: Path, device: torch.device) -> Weights:
    """Reads all tensors of a folder, from one file or from the files of an index."""
    tensors: Weights = {}
    for name in _weight_files(folder):
        file = folder / name
        if not file.is_file():
            raise RunError(f"{folder} lacks {name}, so it is incomplete; {DOWNLOAD_AGAIN}")
        try:
            tensors |= load_file(file, device=str(device))
        except (SafetensorError, OSError) as error:
            raise RunError(f"{file} is damaged or truncated ({error}); {DOWNLOAD_AGAIN}") from error
    if not tensors:
        raise RunError(f"{folder} has no weights; {DOWNLOAD_AGAIN}")
    return tensors


def _weight_files(folder: Path) -> list[str]:
    if (folder / INDEX).is_file():
        shape = {"weight_map": {str: str}}
        names = set(read_json(folder / INDEX, shape, RunError, DOWNLOAD_AGAIN)["weight_map"].values())
        if outside := [name for name in names if Path(name).name != name]:
            raise RunError(f"{folder / INDEX} names {shown(outside[0])}, which is not in its folder")
        return sorted(names)
    if not (folder / WEIGHTS).is_file() and any(any(folder.glob(one)) for one in PICKLED):
        raise RunError(
            f"{folder} has pickled weights, which can run code when they are read; convert them: "
            f'python -c "from transformers import AutoModelForPreTraining as M; '
            f"M.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})\""
        )
    return [WEIGHTS]


def _check_output(output: Path, overwrite: bool) -> None:
    """Raises RunError unless `output` is free or, with `overwrite`, an exported model."""
    if not output.exists():
        return
    if not overwrite:
        raise RunError(f"{output} exists; choose another folder, or pass overwrite=True")
    known = {CONFIG, WEIGHTS, *TOKENIZER_FILES}
    if not is_pretrained(output) or {path.name for path in output.iterdir()} - known:
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
