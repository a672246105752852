"""Untrusted files: any damage raises our own error with a short, printable message."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest

from trainings import CONFIG, go, last_checkpoint
from writehead.data.bpe import BPETokenizer
from writehead.data.dataset import Dataset
from writehead.errors import DataError, WriteheadError
from writehead.paper.report import make_report
from writehead.runs import load_run
from writehead.training.journal import read_log
from writehead.training.plan import read_plan

RESULTS = Path(__file__).parents[2] / "results"
RAW = [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"a":' * 100_000, b"9" * 400, b"NaN"]
RAW += [json.dumps(value).encode() for value in ("x" * 10_000_000, {"\x1b[2J" * 99_999: 1})]

BAD = cycle(
    [None, True, -1, 1.5, "\x1b[2J" * 9_999, [], {"a": 1}, 2**31, 2**63, 10**30, float("inf")]
)


@pytest.fixture(scope="module")
def trained(dataset, tmp_path_factory):
    run = tmp_path_factory.mktemp("hostile") / "run"
    go(dataset, run, replace(CONFIG, steps=4))
    return run


def report_on(path: Path) -> None:
    make_report(path.parents[2])


# where each file comes from, and what reads it
FILES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "config.json": ("run", lambda path: load_run(path.parent)),
    "train.json": ("run", lambda path: read_plan(path.parent)),
    "log.jsonl": ("run", lambda path: read_log(path.parent)),
    "dataset.json": ("dataset", lambda path: Dataset.open(path.parent)),
    "table2/paper/multi-query.json": ("results", report_on),
}


def damaged(value: Any) -> Iterator[Any]:
    """Yields a JSON value with one inner value missing or replaced; in lists, only the first."""
    if isinstance(value, list) and value:
        yield from ([one, *value[1:]] for one in damaged(value[0]))
    if isinstance(value, dict):
        for name, inner in value.items():
            yield {other: value[other] for other in value if other != name}
            for bad in (*islice(BAD, 2), *damaged(inner)):
                yield value | {name: bad}


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_one_short_sentence(dataset, trained, tmp_path, name):
    source, read = FILES[name]
    path = tmp_path / source / name
    if source == "results":
        path.parent.mkdir(parents=True)
        shutil.copyfile(RESULTS / name, path)
    else:
        shutil.copytree(dataset if source == "dataset" else trained, tmp_path / source)
        (tmp_path / source / "checksums.sha256").unlink(missing_ok=True)  # it would be noticed
    text = path.read_text()
    whole = json.loads(text.partition("\n")[0] if name == "log.jsonl" else text)
    messages = []
    for content in (*RAW, *(json.dumps(value).encode() for value in damaged(whole))):
        path.write_bytes(content + b"\n")
        try:
            read(path)
        except WriteheadError as error:
            messages.append(str(error))
    assert len(messages) > len(RAW) / 2
    assert max(map(len, messages)) < 1000
    assert all(map(str.isprintable, messages))


def test_damaged_progress_is_one_short_sentence(dataset, trained, tmp_path):
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    path = last_checkpoint(run) / "training.json"
    (path.parent / "checksums.sha256").unlink()
    whole = json.loads(path.read_text())
    changes = [{"step": -1}, {"step": 3}, {"dev": {"4": "x"}}, {"interim": 3}, {"data": {}}]
    for place in ({"carry": [10**6]}, {"cursor": -1}, {"seed": "\x1b[2J" * 999}):
        changes.append({"data": whole["data"] | place})
    for change in changes:
        path.write_text(json.dumps(whole | change))
        with pytest.raises(WriteheadError) as caught:
            go(dataset, run)
        assert len(str(caught.value)) < 1000
        assert str(caught.value).isprintable()


def test_a_changed_byte_of_a_tokenizer_never_ends_in_another_error(dataset):
    whole = (dataset / "tokenizer.model").read_bytes()
    text = "Kalo mi ta, ü 😀 \x01"
    refused = 0
    for at in range(whole.index(b"<0x41>") - 6, whole.index(b"<0x45>") + 2):
        for byte in (0x00, 0x7F, 0xC3, whole[at] ^ 1):
            changed = bytearray(whole)
            changed[at] = byte
            try:
                tokenizer = BPETokenizer(bytes(changed))
                tokenizer.decode(tokenizer.encode(text))
                tokenizer.decode(tokenizer.encode_all([text])[0])
            except DataError:
                refused += 1
    assert refused > 50
    with pytest.raises(DataError, match="cannot encode or decode"):
        BPETokenizer(whole).decode([10**6])
