"""Text from files, and parquet from a folder and from a local server that answers like the hub."""

import bz2
import gzip
import json
import lzma
import random
import shutil
import subprocess
import sys
import tracemalloc
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pyarrow
import pyarrow.parquet
import pytest

from corpora import pairs, sentences
from processes import environment
from writehead.data.encode import chunked
from writehead.data.hub import hub_inputs
from writehead.data.sources import MAX_LINE, TextFiles
from writehead.errors import DataError

COMPRESS = {"gz": gzip.compress, "xz": lzma.compress, "bz2": bz2.compress}


def read(*paths):
    return list(TextFiles(paths).rows())


@pytest.mark.parametrize("suffix", ["", *COMPRESS])
def test_text_is_read_whatever_its_compression_and_only_line_feeds_end_a_line(tmp_path, suffix):
    lines = [*sentences(3000, seed=3, longest=4), "", "\r", "\u2028", "é\x85", "long" * 9, "last"]
    path, pack = tmp_path / f"text.{suffix}", COMPRESS.get(suffix, bytes)
    path.write_bytes(pack("\n".join(lines).encode()))  # without a final newline
    assert read(path) == [(line,) for line in lines]


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


def write_table(path, name, column):
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table({name: column}), path)


def rows_of(corpora):
    return [row for corpus in corpora for row in corpus.rows()]


@pytest.fixture
def folder(tmp_path):
    """wmt14 (translations of four splits) and lm1b (text without a dev split) as on the hub."""
    files = {"de-en/train-00000-of-00002": pairs(60)[:35], "de-en/test": pairs(5, seed=2)}
    files |= {"de-en/train-00001-of-00002": pairs(60)[35:], "fr-en/train": pairs(5, seed=3)}
    for name, rows in (files | {"de-en/validation": pairs(7, seed=1)}).items():
        column = [{"de": german, "en": english} for english, german in rows]
        write_table(tmp_path / "wmt14" / f"{name}.parquet", "translation", column)
    write_table(tmp_path / "lm1b" / "train" / "0.parquet", "text", sentences(30, seed=0))
    write_table(tmp_path / "lm1b" / "train" / "1.parquet", "text", ["last", None])
    write_table(tmp_path / "lm1b" / "test" / "0.parquet", "text", sentences(4, seed=2))
    return tmp_path


def test_folders_are_read_by_split_and_direction(folder):
    inputs = hub_inputs(str(folder / "wmt14"), "en-de")
    assert rows_of(inputs.train) == pairs(60)
    assert rows_of(inputs.test) == pairs(5, seed=2)
    other = hub_inputs(str(folder / "wmt14"), "de-en")
    assert rows_of(other.dev) == [(b, a) for a, b in pairs(7, seed=1)]
    inputs, dev = hub_inputs(str(folder / "lm1b")), [(line,) for line in sentences(4, seed=2)]
    assert rows_of(inputs.train) == [(line,) for line in (*sentences(30, seed=0), "last", "")]
    assert (rows_of(inputs.dev), inputs.test) == (dev, ())  # its test split serves as dev


@pytest.mark.parametrize(
    ("name", "pair", "words"),
    [
        ("wmt14", None, "but lacks text"),
        ("wmt14", "en-fi", "but lacks translation.fi"),
        ("wmt14", "ende", "en-de"),
        ("empty", None, "no parquet files"),
        ("damaged", None, "is not a Parquet file"),
    ],
)
def test_an_unusable_folder_is_refused_with_the_reason(folder, name, pair, words):
    (folder / "empty").mkdir()
    (folder / "damaged").mkdir()
    (folder / "damaged" / "train.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match=words):
        rows_of(hub_inputs(str(folder / name), pair).train)


class Hub(SimpleHTTPRequestHandler):
    """Serves files with the headers that the hub's client asks for."""

    def end_headers(self):
        self.send_header("ETag", f'"{abs(hash(self.path))}"')
        self.send_header("X-Repo-Commit", "0" * 40)
        super().end_headers()


FETCH = """
import json, sys
from test_sources import hub_inputs, rows_of, DataError
def refusal():
    try:
        hub_inputs("nobody/none")
    except DataError as error:
        return str(error)
found = [rows_of(hub_inputs("wmt14").train), rows_of(hub_inputs("wmt/wmt14", "de-en").dev)]
found += [rows_of(hub_inputs("lm1b").dev), refusal()]
print(json.dumps(found), flush=True)
sys.stdin.read()  # until the server has stopped
print(json.dumps(refusal()))
"""


def test_wmt14_and_lm1b_are_fetched_by_name(folder):
    site, lm1b = folder / "site", "billion-word-benchmark/lm1b"
    revisions = {"wmt/wmt14": ("main",), lm1b: ("main", "refs/convert/parquet")}
    for name, each in revisions.items():
        for revision in each:
            api, sha = site / "api" / "datasets" / name, str(int(revision != each[-1])) * 40
            place, files = site / "datasets" / name / "resolve" / sha, []
            if revision == each[-1]:  # lm1b has parquet files in its converted revision only
                shutil.copytree(folder / name.split("/")[1], place)
                files = [path.relative_to(place).as_posix() for path in place.rglob("*.parquet")]
            tree = [{"type": "file", "path": file, "size": 1, "oid": "0"} for file in files]
            answers = {f"revision/{revision}": {"id": name, "sha": sha}, f"tree/{sha}": tree}
            for path, answer in answers.items():
                (api / path).parent.mkdir(parents=True, exist_ok=True)
                (api / path).write_text(json.dumps(answer))
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub, directory=site)) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        settings = {"HF_ENDPOINT": address, "HF_HOME": str(site / "cache"), "HF_HUB_OFFLINE": "0"}
        variables = environment(**settings, NO_PROXY="127.0.0.1")
        command, pipes = [sys.executable, "-c", FETCH], dict.fromkeys(("stdin", "stdout"), -1)
        process = subprocess.Popen(command, env=variables, cwd=site, **pipes)
        train, dev, text, refusal = json.loads(process.stdout.readline())
        server.shutdown()
    unreachable, _ = process.communicate(timeout=60)
    assert b"nobody/none could not be downloaded" in unreachable
    assert [tuple(row) for row in train] == pairs(60)
    assert tuple(dev[0]) == pairs(7, seed=1)[0][::-1]
    assert text == [[line] for line in sentences(4, seed=2)]
    assert "nobody/none could not be downloaded" in refusal
