"""Reads Hugging Face models, and opens what the name of a run stands for: also their folders."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from writehead import runs
from writehead.config import ModelConfig, QuantizationConfig
from writehead.data.tokenizer import has_tokenizer, tokenizer_files
from writehead.errors import RunError, shown
from writehead.interop.families import Described, find_config, read_exact
from writehead.interop.hub import find_folder
from writehead.interop.layout import Layout, Weights
from writehead.runs import Run
from writehead.runs.folder import CONFIG, WEIGHTS, empty_model, fill_model, read_quantization
from writehead.util.checksums import sha256
from writehead.util.devices import find_device
from writehead.util.json_files import read_json

INDEX, GENERATION = "model.safetensors.index.json", "generation_config.json"
OUTPUT = "lm_head.weight"
PICKLED = ("pytorch_model*.bin", "*.pt", "*.pth")
DOWNLOAD_AGAIN = "download or copy the folder again"


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
    if described.config.tied and not _is_tied(described, tensors):
        described = replace(described, config=replace(described.config, tied=False))
    layout = layout_of(described)
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
    """Loads a run, the folder of a Hugging Face model, or a model on the Hugging Face hub."""
    folder, place = find_folder(run), find_device(device)
    if not is_pretrained(folder):
        return runs.load_run(folder, device=place, dtype=dtype, backend=backend)
    pretrained = read_pretrained(folder, device=place, dtype=dtype)
    model = empty_model(pretrained.config, backend)
    fill_model(model, pretrained.weights, dtype, folder)
    return Run(model.eval(), folder if has_tokenizer(folder) else None)


def read_config(run: Path | str) -> ModelConfig:
    """Reads the config of a run, the folder of a Hugging Face model, or a model on the hub."""
    folder = find_folder(run, config_only=True)
    return _describe(folder).config if is_pretrained(folder) else runs.read_config(folder)


@dataclass(frozen=True)
class RunFacts:
    """The config and quantization of a run or Hugging Face model, and its files."""

    config: ModelConfig
    quantization: QuantizationConfig | None
    bytes: int
    fingerprint: str  # sixteen hex digits that identify the weights

    @classmethod
    def read(cls, folder: Path) -> "RunFacts":
        """Reads a folder; hashing takes about a second per gigabyte of weights."""
        is_foreign = is_pretrained(folder)
        names = _weight_files(folder) if is_foreign else [WEIGHTS]
        weights = [folder / name for name in names]
        files = [folder / CONFIG, *weights, *tokenizer_files(folder)]
        return cls(
            read_config(folder),
            None if is_foreign else read_quantization(folder),
            sum(path.stat().st_size for path in files),
            "+".join(sha256(path)[:16] for path in weights),
        )


def _describe(folder: Path) -> Described:
    return read_exact(folder / CONFIG, generation_values(folder))


def generation_values(folder: Path) -> dict[str, Any]:
    """Returns the values of generation_config.json, which not every model has."""
    file = folder / GENERATION
    values: dict[str, Any] = read_json(file, dict, RunError) if file.is_file() else {}
    return values


def layout_of(described: Described) -> Layout:
    """Returns where the tensors of a model are in theirs."""
    family = described.family
    assert family.entries is not None
    model = empty_model(described.config)
    return Layout.of(family, family.entries(described.config), model.state_dict())


def _is_tied(described: Described, tensors: Weights) -> bool:
    """Returns whether the output matrix is the embedding, whatever the config says.

    Like transformers, we do not tie matrices that are stored with different values.
    """
    layout = layout_of(described)
    given = {layout.full_name(name): T for name, T in tensors.items()}
    output, names = given.get(OUTPUT), [e for e in layout.entries.values() if OUTPUT in e.aliases]
    embedding = given.get(names[0].theirs) if names else None
    return output is None or embedding is None or torch.equal(output, embedding)


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
        names = set(
            read_json(folder / INDEX, shape, RunError, DOWNLOAD_AGAIN)["weight_map"].values()
        )
        if outside := [name for name in names if Path(name).name != name]:
            raise RunError(
                f"{folder / INDEX} names {shown(outside[0])}, which is not in its folder"
            )
        return sorted(names)
    if not (folder / WEIGHTS).is_file() and any(any(folder.glob(one)) for one in PICKLED):
        raise RunError(
            f"{folder} has pickled weights, which can run code when they are read; convert them: "
            f'python -c "from transformers import AutoModelForPreTraining as M; '
            f'M.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"'
        )
    return [WEIGHTS]
