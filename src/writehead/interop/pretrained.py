"""Reads Hugging Face models, and loads runs or Hugging Face models by path or name."""

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from writehead import runs
from writehead.config import ModelConfig, QuantizationConfig
from writehead.data.tokenizer import (
    Files,
    load_tokenizer,
    read_tokenizer,
    tokenizer_files,
)
from writehead.errors import RunError, shown
from writehead.interop.families import Described, Fields, find_config, read_exact, read_fields
from writehead.interop.families.family import OUTPUT
from writehead.interop.hub import find_folder, has_pickles, pickled_advice
from writehead.interop.layout import Layout, Weights
from writehead.ops.embedding import sinusoidal
from writehead.runs import Run
from writehead.runs.folder import (
    CONFIG,
    ORIGINAL,
    WEIGHTS,
    empty_model,
    fill_model,
    kept_files,
    read_model,
    read_quantization,
)
from writehead.util.checksums import sha256
from writehead.util.devices import find_device
from writehead.util.json_files import read_json

log = logging.getLogger(__name__)

INDEX, GENERATION = "model.safetensors.index.json", "generation_config.json"
# stored tables are computed from float32 angles and rounded to the dtype of the model
SINUSOID_TOLERANCE = 0.02
MAX_POSITIONS = 1 << 20
# settings of generation_config.json that change which tokens a model may generate
NOT_APPLIED = ("begin_suppress_tokens", "forced_decoder_ids", "sequence_bias")
DOWNLOAD_AGAIN = "download or copy the folder again"


@dataclass(frozen=True)
class Pretrained:
    """A Hugging Face model: its weights under our names, and what else its format contains."""

    described: Described
    weights: Weights
    folder: Path
    tensors: tuple[str, ...]  # names in the files
    dtype: str  # of the embedding in the files
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
    stored = dtype_name(weights)
    if dtype is not None:
        weights = {name: W.to(dtype) for name, W in weights.items()}
    is_computed = described.family.is_computed
    full_name = described.family.full_name
    computed = {name: T for name, T in tensors.items() if is_computed(full_name(name))}
    _check_sinusoids(described, computed, folder)
    return Pretrained(described, weights, folder, tuple(tensors), stored, computed)


def dtype_name(weights: Mapping[str, Tensor]) -> str:
    """Returns the name of the dtype of a model's embedding."""
    return str(weights["tokens.weight"].dtype).removeprefix("torch.")


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
    _warn_of_settings(folder)
    return Run(model.eval(), folder if _tokenizer_files(folder) else None)


def _tokenizer_files(folder: Path) -> list[Path]:
    """Returns the files of a tokenizer, which may be incomplete."""
    return [path for path in tokenizer_files(folder) if path.name != GENERATION]


@dataclass(frozen=True)
class Source:
    """A model to write as another run: its weights, and the files to keep beside them."""

    folder: Path
    config: ModelConfig
    weights: Weights
    files: Files
    quantization: QuantizationConfig | None = None


def read_source(run: Path | str, *, dtype: torch.dtype | None = None) -> Source:
    """Reads a run or a Hugging Face model to write it as another run."""
    folder = find_folder(run)
    if is_pretrained(folder):
        source = import_source(read_pretrained(folder))
        model = empty_model(source.config)
        fill_model(model, source.weights, dtype, folder)  # raises if their dtypes differ
        return replace(source, weights=model.state_dict())
    model = read_model(folder, dtype=dtype)
    quantization = read_quantization(folder)
    return Source(folder, model.config, model.state_dict(), kept_files(folder), quantization)


def import_source(pretrained: Pretrained) -> Source:
    """Checks the tokenizer of a Hugging Face model; returns what to write as a run."""
    folder = pretrained.folder
    files = read_tokenizer(folder)
    if _tokenizer_files(folder):
        load_tokenizer(folder).check_fits(pretrained.config)
    else:
        log.warning("%s has no tokenizer; the run will not encode or decode text", folder)
    _warn_of_settings(folder)
    original = {
        "config": (folder / CONFIG).read_text(encoding="utf-8"),
        "tensors": list(pretrained.tensors),
        "dtype": pretrained.dtype,
    }
    files[ORIGINAL[0]] = json.dumps(original, indent=1).encode()
    if pretrained.computed:
        files[ORIGINAL[1]] = save(pretrained.computed)
    return Source(folder, pretrained.config, pretrained.weights, files)


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
    file = folder / CONFIG
    return read_exact(Fields(file, read_fields(file)), generation_fields(folder))


def generation_fields(folder: Path) -> Fields:
    """Returns the values of generation_config.json, which not every model has."""
    file = folder / GENERATION
    return Fields(file, read_fields(file) if file.is_file() else {})


def _warn_of_settings(folder: Path) -> None:
    """Warns of generation settings that would change the output but are not applied."""
    file = folder / GENERATION
    data = generation_fields(folder).data if file.is_file() else read_fields(folder / CONFIG)
    words = data.get("bad_words_ids")
    several = isinstance(words, list) and any(isinstance(w, list) and len(w) > 1 for w in words)
    names = [name for name in NOT_APPLIED if data.get(name)]
    for name in [*names, *(["bad_words_ids of several tokens"] if several else [])]:
        log.warning("%s: %s is not applied", file if file.is_file() else folder / CONFIG, name)


def _check_sinusoids(described: Described, computed: Mapping[str, Tensor], folder: Path) -> None:
    """Raises RunError if a stored table of positions is not the one that we compute."""
    config, family = described.config, described.family
    for name, T in computed.items():
        if not re.fullmatch(family.sinusoids, family.full_name(name)):
            continue
        is_table = T.dim() == 2 and T.shape[1] == config.d and len(T) <= MAX_POSITIONS
        table = sinusoidal(len(T), config.d, config.sinusoid) if is_table else T
        table[: config.position_offset] = T[: config.position_offset]  # rows that are not used
        if not is_table or not torch.allclose(
            T.cpu().float(), table, rtol=0.0, atol=SINUSOID_TOLERANCE
        ):
            raise RunError(
                f"{folder}: {name} differs from the sinusoidal positions of its config; "
                f"{DOWNLOAD_AGAIN}"
            )


def layout_of(described: Described) -> Layout:
    """Returns how the files of a Hugging Face model hold the tensors of ours."""
    family = described.family
    assert family.entries is not None
    model = empty_model(described.config)
    return Layout.of(family, family.entries(described.config), model.state_dict())


def _is_tied(described: Described, tensors: Weights) -> bool:
    """Returns whether the output matrix is the embedding, whatever the config says.

    Like transformers, we do not tie matrices that are stored with different values.
    """
    layout = layout_of(described)
    given = {described.family.full_name(name): T for name, T in tensors.items()}
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
                f"{folder / INDEX} names {shown(outside[0])}, which is not in its folder; "
                f"{DOWNLOAD_AGAIN}"
            )
        return sorted(names)
    if not (folder / WEIGHTS).is_file() and has_pickles(folder):
        raise RunError(pickled_advice(str(folder), folder))
    return [WEIGHTS]
