"""Files and folders appear complete or not at all, and a lock belongs to one process."""

import errno
import fcntl
import os
import signal
from contextlib import ExitStack
from unittest.mock import Mock

import pytest

from processes import run_python
from texts import names
from writehead.util.files import atomic_directory, atomic_file, write_file
from writehead.util.locks import locked

KILLED = """
import os, signal, sys
from pathlib import Path
from writehead.util.files import atomic_directory, atomic_file
with {make}(Path(sys.argv[1])):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_file_appears_when_it_is_complete_and_an_error_keeps_the_old_one(tmp_path):
    path, plain = tmp_path / ("ü" * 127), tmp_path / "plain"  # the longest name
    with atomic_file(path) as file:
        file.write(b"old")
        assert not path.exists()
        write_file(path, "second")  # which does not take the work in progress for a leftover
    with pytest.raises(ZeroDivisionError), atomic_file(path) as file:
        file.write(b"new")
        raise ZeroDivisionError
    assert path.read_text() == "old"
    plain.touch()
    assert path.stat().st_mode == plain.stat().st_mode
    assert names(tmp_path) == ["plain", path.name]


@pytest.mark.parametrize("linkable", [True, False])
def test_the_first_of_two_writers_wins(tmp_path, monkeypatch, linkable):
    file, folder = tmp_path / "file", tmp_path / "folder"
    if not linkable:  # a file system without hard links
        monkeypatch.setattr(os, "link", Mock(side_effect=PermissionError(1, "not permitted")))
    with pytest.raises(FileExistsError), atomic_file(file, replace=False) as second:
        second.write(b"second")
        write_file(file, "first", replace=False)
    with pytest.raises(FileExistsError), atomic_directory(folder) as other:
        (other / "second").touch()
        with atomic_directory(folder) as one:
            (one / "first").touch()
    assert file.read_text() == "first"
    assert names(folder) == ["first"]
    assert names(tmp_path) == ["file", "folder"]


@pytest.mark.parametrize("make", ["atomic_file", "atomic_directory"])
def test_the_next_writer_removes_what_a_killed_one_left(tmp_path, make):
    path = tmp_path / "out"
    assert run_python(KILLED.format(make=make), path)[0] == -signal.SIGKILL
    assert len(names(tmp_path)) == 1
    other = tmp_path / ".out.txt.01234567.tmp"  # of another place
    other.touch()
    write_file(path, "whole")
    assert names(tmp_path) == [other.name, "out"]


def test_hidden_names_of_another_user_and_links_are_left_alone(tmp_path, monkeypatch):
    path, victim, planted = tmp_path / "out", tmp_path / "victim", tmp_path / ".out.01234567.tmp"
    victim.mkdir()
    planted.symlink_to(victim)
    write_file(path, "whole")
    assert planted.is_symlink()
    planted.unlink()
    planted.mkdir()
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    write_file(path, "whole")
    assert planted.is_dir()
    monkeypatch.undo()
    write_file(path, "whole")
    assert names(tmp_path) == ["out", "victim"]


def test_a_lock_has_one_owner_and_leaves_no_file(tmp_path):
    lock = tmp_path / "folder" / ".lock"
    with locked(lock) as mine:
        for _ in range(2):  # being refused does not release the owner's lock
            with locked(lock) as another:
                assert (mine, another) == (True, False)
    with ExitStack() as first:
        assert first.enter_context(locked(lock))
        lock.unlink()
        with locked(lock) as second:
            first.close()  # spares the file of the next owner
            with locked(lock) as third:
                assert (second, third) == (True, False)
    assert not list(lock.parent.iterdir())


def test_a_killed_process_releases_its_lock(tmp_path):
    lock, (reader, writer) = tmp_path / ".lock", os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with locked(lock) as mine:
                os.write(writer, b"1" if mine else b"0")
                signal.pause()
        finally:
            os._exit(1)  # an error must not continue the test session in the child
    assert os.read(reader, 1) == b"1"
    with locked(lock) as mine:
        assert not mine
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert lock.exists()
    with locked(lock) as mine:
        assert mine


def test_only_a_file_system_without_locks_grants_the_lock_to_everyone(tmp_path, monkeypatch):
    def fail(file, how):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", fail)
    number = errno.ENOSYS
    with locked(tmp_path / ".lock") as mine:
        assert mine
    number = errno.EIO
    with pytest.raises(OSError, match="Input/output"), locked(tmp_path / ".lock"):
        pass
