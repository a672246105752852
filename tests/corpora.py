"""Small made-up corpora for the tests, and datasets prepared from them."""

import random
from collections.abc import Sequence
from pathlib import Path

from writehead.config import PrepareConfig
from writehead.data.dataset import Dataset
from writehead.data.prepare import prepare
from writehead.data.sources import Inputs, parallel_files, text_files

SYLLABLES = "ka lo mi tü ße ro na wi äu de fö gu han sel ber ling"


def sentences(count: int, seed: int, longest: int = 24) -> list[str]:
    """Distinct lines of made-up words, one of them a single word."""
    generator = random.Random(seed)
    made: dict[str, None] = {}
    while len(made) < count:
        words = (
            "".join(generator.choices(SYLLABLES.split(), k=generator.randint(1, 4)))
            for _ in range(generator.randint(1, longest))
        )
        made[" ".join(words).capitalize() + "."] = None
    return list(made)


def pairs(count: int, seed: int = 0, longest: int = 24) -> list[tuple[str, str]]:
    """A line and its reverse in capitals: equally long, but not the same."""
    return [(line, line[::-1].upper()) for line in sentences(count, seed, longest)]


def write(path: Path, lines: Sequence[str]) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def write_pairs(folder: Path, name: str, rows: list[tuple[str, str]]) -> tuple[Path, Path]:
    sources, targets = zip(*rows, strict=True)
    return write(folder / f"{name}.a", sources), write(folder / f"{name}.b", targets)


def pair_inputs(folder: Path, rows: list[tuple[str, str]]) -> Inputs:
    source, target = write_pairs(folder, "train", rows)
    return parallel_files([source], [target], [], [])


def translation_dataset(
    folder: Path, count: int = 400, longest: int = 24, **settings: int
) -> Dataset:
    """A dataset of `pairs(count)`, without a dev split unless `dev` lines are asked for."""
    config = PrepareConfig(task="translation", **{"vocab_size": 400, "dev": 0} | settings)
    inputs = pair_inputs(folder, pairs(count, longest=longest))
    return prepare(folder / "translation", inputs, config, threads=1)


def language_dataset(folder: Path, count: int = 300, longest: int = 60, **settings: int) -> Dataset:
    config = PrepareConfig(task="language", **{"vocab_size": 400, "dev": 0} | settings)
    text = write(folder / "text", sentences(count, seed=5, longest=longest))
    return prepare(folder / "language", text_files([text], []), config, threads=1)


def files(folder: Path) -> dict[str, bytes]:
    """Every file in a folder, to compare byte for byte."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}
