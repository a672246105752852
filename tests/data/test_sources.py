import bz2
import gzip
import lzma
import random
import tracemalloc

import pytest

from corpora import sentences, write
from writehead.data.encode import chunked
from writehead.data.sources import MAX_LINE, TextFiles
from writehead.errors import DataError

COMPRESS = {"gz": gzip.compress, "xz": lzma.compress, "bz2": bz2.compress}


def read(*paths):
    return list(TextFiles(paths).rows())


@pytest.mark.parametrize("suffix", ["", *COMPRESS])
def test_text_is_read_whatever_its_compression(tmp_path, suffix):
    lines, path = sentences(5000, seed=3, longest=4), tmp_path / f"text.{suffix}"
    pack = COMPRESS.get(suffix, bytes)
    path.write_bytes(pack("\n".join(lines).encode()))  # without a final newline
    assert read(path) == [(line,) for line in lines]


def test_only_line_feeds_end_a_line(tmp_path):
    lines = ["", "a", "\r", "\u2028", "é\x85", "long" * 9, "last"]
    assert read(write(tmp_path / "text", lines)) == [(line,) for line in lines]


def test_long_lines_take_little_memory(tmp_path):
    (tmp_path / "text.xz").write_bytes(lzma.compress(b"one\n" + b"x" * 50_000_000, preset=0))
    tracemalloc.start()
    with pytest.raises(DataError, match=r"line 2 of .* too long"):
        read(tmp_path / "text.xz")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * MAX_LINE
    assert [len(chunk) for chunk in chunked([("z" * 400_000,)] * 7)] == [3, 3, 1]


TEXT = random.Random(0).randbytes(20_000).hex().encode()
BAD = {
    "empty": (b"", "is empty"),
    "empty.xz": (lzma.compress(b""), "is empty"),
    "zst": (b"\x28\xb5\x2f\xfd rest", "not UTF-8 in line 1"),
    "latin": (b"fine\n" * 2999 + b"sch\xf6n\n", r"not UTF-8 in line 3,000 \(byte 0xf6\)"),
}
for suffix, compress in COMPRESS.items():
    whole = compress(TEXT)
    BAD[f"cut.{suffix}"] = (whole[:-5000], "again")
    flipped = whole[:6000] + bytes([whole[6000] ^ 255]) + whole[6001:]
    BAD[f"flipped.{suffix}"] = (flipped, "again")


@pytest.mark.parametrize("kind", BAD)
def test_an_unreadable_file_is_refused_by_name(tmp_path, kind):
    path = tmp_path / f"bad.{kind}"
    path.write_bytes(BAD[kind][0])
    with pytest.raises(DataError, match=f"{path}.*{BAD[kind][1]}"):
        read(path)
