import bz2
import gzip
import lzma
import os
import random
import tracemalloc
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corpora import sentences, write
from writehead.data import sources
from writehead.data.sampling import Reservoir
from writehead.data.sources import MAX_LINE, TextFiles, parallel_files
from writehead.errors import DataError


def read(*paths):
    chunks = list(TextFiles(paths).chunks())
    assert [chunk.done for chunk in chunks] == sorted(chunk.done for chunk in chunks)
    return [row for chunk in chunks for row in zip(*chunk.sides, strict=True)], chunks


@pytest.mark.parametrize("pack", [bytes, gzip.compress, lzma.compress, bz2.compress])
def test_text_is_read_whatever_the_compression_and_the_name(tmp_path, pack):
    lines = sentences(5000, seed=3, longest=4)
    path = tmp_path / "text"
    path.write_bytes(pack("\n".join(lines).encode()))  # no line break at the end
    rows, chunks = read(path)
    assert rows == [(line,) for line in lines]
    assert [chunk.first for chunk in chunks] == [0, 2000, 4000]
    assert chunks[-1].done == 1.0


@given(content=st.lists(st.sampled_from(["", "a", "é", "\r", "\u2028", "\x85", "long" * 9])))
def test_only_line_feeds_end_a_line_wherever_blocks_end(tmp_path_factory, content):
    path = write(tmp_path_factory.mktemp("blocks") / "text", [*content, "last"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "BLOCK", 5)
        rows, _ = read(path)
    assert rows == [(line,) for line in [*content, "last"]]


def test_a_line_of_ten_megabytes_is_passed_over_in_little_memory(tmp_path):
    path = tmp_path / "text.xz"
    huge = b"x" * 10_000_000
    edge = b"y" * MAX_LINE
    path.write_bytes(lzma.compress(b"\n".join([b"one", huge, edge, edge + b"y", b"two"]), preset=0))
    tracemalloc.start()
    rows, _ = read(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert rows == [("one",), (None,), (edge.decode(),), (None,), ("two",)]
    assert peak < 9_000_000


def test_chunks_are_small_when_lines_are_long(tmp_path):
    path = write(tmp_path / "text", ["z" * 400_000] * 7)
    _, chunks = read(path)
    assert [len(chunk) for chunk in chunks] == [3, 3, 1]


def test_files_of_different_length_are_told_with_both_counts(tmp_path):
    a, b = write(tmp_path / "a", ["x"] * 2500), write(tmp_path / "b", ["y"] * 2502)
    for pair in ((a, b), (b, a)):
        with pytest.raises(DataError) as caught:
            read(*pair)
        assert f"{a} has 2,500 lines" in str(caught.value)
        assert f"{b} has 2,502 lines" in str(caught.value)
        assert f"{b} is longer" in str(caught.value)


def test_text_that_is_not_utf_8_is_told_with_its_line(tmp_path):
    path = tmp_path / "latin"
    path.write_bytes(b"fine\n" * 2999 + "schön\n".encode("latin-1") + b"fine\n")
    with pytest.raises(DataError, match=r"latin is not UTF-8 in line 3,000 \(byte 0xf6\)"):
        read(path)


def make_bad_file(tmp_path, kind):
    path = tmp_path / f"bad.{kind}"
    text = random.Random(0).randbytes(200_000).hex().encode()
    content = {
        "empty": b"",
        "empty.xz": lzma.compress(b""),
        "cut.xz": lzma.compress(text)[:-5000],
        "cut.gz": gzip.compress(text)[:-5000],
        "cut.bz2": bz2.compress(text)[:-5000],
        "flipped.xz": bytes(b ^ (0xFF * (i == 60_000)) for i, b in enumerate(lzma.compress(text))),
        "flipped.gz": bytes(b ^ (0xFF * (i == 60_000)) for i, b in enumerate(gzip.compress(text))),
        "flipped.bz2": bytes(b ^ (0xFF * (i == 60_000)) for i, b in enumerate(bz2.compress(text))),
        "plain.xz": b"not compressed\n",
        "zst": b"\x28\xb5\x2f\xfd rest",
        "zip": b"PK\x03\x04 rest",
        "parquet": b"PAR1 rest",
    }
    path.write_bytes(content[kind])
    return path


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("empty", "is empty"),
        ("empty.xz", "is empty"),
        ("cut.xz", "damaged or cut short"),
        ("cut.gz", "damaged or cut short"),
        ("cut.bz2", "damaged or cut short"),
        ("flipped.xz", "damaged or cut short"),
        ("flipped.gz", "damaged or cut short"),
        ("flipped.bz2", "make it again"),
        ("plain.xz", "is not .xz inside"),
        ("zst", "is a .zst file"),
        ("zip", "is a .zip file"),
        ("parquet", "give its folder with --hub"),
    ],
)
def test_a_file_that_cannot_be_read_is_told_by_name(tmp_path, kind, words):
    path = make_bad_file(tmp_path, kind)
    with pytest.raises(DataError) as caught:
        read(path)
    assert str(path) in str(caught.value)
    assert words in str(caught.value)


def test_a_missing_file_and_a_folder_are_told_before_anything_is_read(tmp_path):
    with pytest.raises(DataError, match="there is no file"):
        TextFiles((tmp_path / "none",)).identity()
    with pytest.raises(DataError, match="is a folder; give a file of text"):
        TextFiles((tmp_path,)).identity()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="not a plain file"):
        TextFiles((tmp_path / "pipe",)).identity()


def test_sources_and_targets_come_in_pairs(tmp_path):
    with pytest.raises(DataError, match="2 --source for 1 --target"):
        parallel_files([tmp_path, tmp_path], [tmp_path], [], [])


def test_a_reservoir_keeps_every_line_with_the_same_chance():
    counts = Counter()
    lines = [str(i) for i in range(40)]
    for seed in range(1500):
        reservoir = Reservoir(8, str(seed))
        for i in range(0, 40, 7):
            reservoir.add(lines[i : i + 7])
        kept = list(reservoir.lines())
        assert len(set(kept)) == 8
        counts.update(kept)
    # 300 expected of each, with a standard deviation of 15.5
    assert min(counts.values()) > 235
    assert max(counts.values()) < 365


def test_a_reservoir_larger_than_the_text_keeps_all_of_it_cut_to_a_bound():
    reservoir = Reservoir(100, "0")
    reservoir.add(["a", "", None, "b" * 5000])
    assert list(reservoir.lines()) == ["a", "b" * 1000]
