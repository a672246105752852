"""Finds the folder of a run or a Hugging Face model, and downloads models from the hub."""

import re
import shlex
from pathlib import Path

from writehead.errors import MissingPackage, RunError, one_line
from writehead.interop.families import FAMILIES, find_config, read_fields
from writehead.util.extras import requires

REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
# pickled weights may contain code, and are not downloaded
PATTERNS = ["*.json", "*.safetensors", "*.spm", "*.model", "merges.txt", "*.jinja"]
# other formats, such as onnx/, copies of the weights, and adapters
OTHERS = ["*/*", "consolidated*", "*.fp16*", "*.fp32*", "*.non_ema*", "adapter_*", "*.index.fp*"]
PICKLED = re.compile(r"(pytorch_model|model).*\.(bin|pt|pth)")


def find_folder(run: Path | str, *, revision: str | None = None, config_only: bool = False) -> Path:
    """Returns the folder of a run: a path, or a name on the hub, whose files are downloaded.

    A name such as Helsinki-NLP/opus-mt-en-de is one on the hub, unless Helsinki-NLP is a folder.
    """
    path = Path(run)
    if not REPOSITORY.fullmatch(str(run)) or path.exists() or path.parent.is_dir():
        if revision is not None:
            raise RunError(
                f"{run} is a path; use revision only with a name on the Hugging Face hub"
            )
        return path
    try:
        with requires("hub"):
            from huggingface_hub import list_repo_files, snapshot_download
    except MissingPackage as error:
        raise MissingPackage(
            f"there is no folder {run}; to download a model of this name from the Hugging Face "
            f"hub, {str(error).partition('; ')[2]}"
        ) from error
    patterns = ["config.json"] if config_only else PATTERNS
    try:
        folder = Path(
            snapshot_download(
                str(run), revision=revision, allow_patterns=patterns, ignore_patterns=OTHERS
            )
        )
        # a complete snapshot in the cache needs no network
        names = (
            []
            if config_only or _has_weights(folder)
            else list_repo_files(str(run), revision=revision)
        )
    except (OSError, ValueError) as error:  # the base classes of the hub's errors
        reason = one_line((str(error).strip().splitlines() or ["no answer"])[0].rstrip("."), 200)
        raise RunError(
            f"there is no folder {run}, and it could not be downloaded from the Hugging Face hub "
            f"({type(error).__name__}: {reason}); check the name and the network"
        ) from error
    if any(PICKLED.fullmatch(name) for name in names):
        raise RunError(pickled_advice(str(run), folder, revision))
    return folder


def pickled_advice(model: str, folder: Path, revision: str | None = None) -> str:
    """Returns advice on converting a model with pickled weights, whose config is in `folder`."""
    kind = read_fields(folder / "config.json").get("model_type") if find_config(folder) else None
    family = FAMILIES.get(str(kind))
    is_language = family is not None and family.task == "language"
    auto = "AutoModelForCausalLM" if is_language else "AutoModelForSeq2SeqLM"
    output = f"{Path(model).name}-safetensors"
    options = "" if revision is None else f", revision={revision!r}"
    code = (
        f"from transformers import {auto} as M, AutoTokenizer as T; a, b = {model!r}, {output!r}; "
        f"M.from_pretrained(a{options}).save_pretrained(b); "
        f"T.from_pretrained(a{options}).save_pretrained(b)"
    )
    return (
        f"{model} has pickled weights, which can run code when they are read; if you trust them, "
        f"convert them to the new folder {output}: python -c {shlex.quote(code)}"
    )


def has_pickles(folder: Path) -> bool:
    """Returns whether a folder has weights in Python's own format."""
    return any(PICKLED.fullmatch(path.name) for path in folder.iterdir())


def _has_weights(folder: Path) -> bool:
    return any(folder.glob("*.safetensors"))
