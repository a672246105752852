"""The files of a bulk job: a file, a folder or a pattern."""

import errno
import os

import pytest

from writehead.data.inputs import find_inputs, is_pattern
from writehead.errors import DataError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name in ("b.txt", "a/c.jsonl", "a/d.txt", "a/.hidden", ".git/x", "[x].txt"):
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path / "data"


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ("data", ["[x].txt", "a/c.jsonl", "a/d.txt", "b.txt"]),
        ("./data/", ["[x].txt", "a/c.jsonl", "a/d.txt", "b.txt"]),
        ("data/b.txt", ["b.txt"]),
        ("data/[x].txt", ["[x].txt"]),  # a name, not a pattern
        ("data/*.txt", ["[x].txt", "b.txt"]),
        ("./data/*/*", ["a/c.jsonl", "a/d.txt"]),
        ("data/**/*.txt", ["[x].txt", "a/d.txt", "b.txt"]),
        ("data/a/../?.txt", ["b.txt"]),
        ("data/a/.hidden", [".hidden"]),
    ],
)
def test_names_are_relative_to_the_folder_or_the_first_wildcard(folder, tmp_path, given, names):
    found = find_inputs(given, tmp_path / "out")
    assert [name for _, name in found] == names
    assert all(path.is_absolute() and path.is_file() for path, _ in found)


def test_the_output_is_not_an_input(folder, tmp_path):
    (folder / "link.txt").symlink_to("a/d.txt")
    names = [name for _, name in find_inputs("data", folder / "a")]
    assert names == ["[x].txt", "b.txt"]
    for given in ("data", "data/b.txt"):
        with pytest.raises(DataError, match="data is also the input"):
            find_inputs(given, folder)


def test_a_link_keeps_its_name(folder, tmp_path):
    (folder / "news.gz").symlink_to("b.txt")
    [found] = find_inputs("data/news.gz", tmp_path / "out")
    assert found == (folder / "news.gz", "news.gz")


def test_missing_input_is_an_error(folder, tmp_path):
    (tmp_path / "empty").mkdir()
    for given, words in (
        ("nowhere.txt", "does not exist"),
        ("empty", "there are no files"),
        ("data/*.gz", "there are no files"),
        ("/dev/null", "is not a regular file"),
        ("data/*/../b.txt", "has .. after a wildcard"),
        ("data/*/../../data/b.txt", "has .. after a wildcard"),
    ):
        with pytest.raises(DataError, match=words):
            find_inputs(given, tmp_path / "out")
    assert [is_pattern(text) for text in ("data/[x].txt", "data/[x]*", "data")] == [0, 1, 0]


def test_nothing_in_a_folder_is_skipped_silently(folder, tmp_path, monkeypatch):
    strange = folder / "a" / "z"
    for make, words in (
        (lambda: os.mkfifo(strange), "z is not a regular file"),
        (lambda: strange.symlink_to("nowhere"), "z is not a regular file"),
        (lambda: strange.symlink_to(tmp_path), "z is a link to a folder"),
    ):
        make()
        with pytest.raises(DataError, match=words):
            find_inputs("data", tmp_path / "out")
        strange.unlink()
    scandir = os.scandir

    def deny(path):
        if os.fspath(path).endswith("a"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", deny)
    with pytest.raises(DataError, match=r"a cannot be read \(Permission denied\)"):
        find_inputs("data", tmp_path / "out")
