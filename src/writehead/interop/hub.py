"""Finds the folder of a run or a Hugging Face model, and downloads models from the hub."""

import re
from pathlib import Path

from writehead.errors import RunError, one_line
from writehead.util.extras import requires

REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
# pickled weights may contain code, and are not downloaded
PATTERNS = ["*.json", "*.safetensors", "*.spm", "*.model", "merges.txt", "*.jinja"]


def find_folder(run: Path | str, *, revision: str | None = None, config_only: bool = False) -> Path:
    """Returns the folder of a run: a path, or a name on the hub, whose files are downloaded.

    A name such as Helsinki-NLP/opus-mt-en-de is one on the hub unless its first part is a folder.
    """
    path = Path(run)
    if not REPOSITORY.fullmatch(str(run)) or path.exists() or path.parent.is_dir():
        if revision is not None:
            raise RunError(f"{run} is a path; a revision is for names on the Hugging Face hub")
        return path
    with requires("hub"):
        from huggingface_hub import snapshot_download
    patterns = ["config.json"] if config_only else PATTERNS
    others = ["*/*"]  # other formats, such as onnx/
    try:
        folder = snapshot_download(
            str(run), revision=revision, allow_patterns=patterns, ignore_patterns=others
        )
    except (OSError, ValueError) as error:  # the base classes of its errors
        reason = one_line((str(error).strip().splitlines() or ["no answer"])[0].rstrip("."), 200)
        raise RunError(
            f"there is no folder {run}, and it could not be downloaded from the Hugging Face hub "
            f"({type(error).__name__}: {reason}); check the name and the network"
        ) from error
    return Path(folder)
