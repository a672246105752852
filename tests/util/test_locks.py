"""A lock belongs to one process and ends with it."""

import errno
import fcntl
import os
import signal
from contextlib import ExitStack

import pytest

from writehead.util.locks import locked


def test_a_lock_has_one_owner_and_leaves_no_file(tmp_path):
    lock = tmp_path / "folder" / ".lock"
    with locked(lock) as mine:
        for _ in range(2):  # being refused does not release the owner's lock
            with locked(lock) as another:
                assert (mine, another) == (True, False)
    assert not list(lock.parent.iterdir())
    with locked(lock) as mine:
        assert mine


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


def test_an_owner_whose_file_was_removed_spares_the_next_owners_file(tmp_path):
    lock = tmp_path / ".lock"
    with ExitStack() as first:
        assert first.enter_context(locked(lock))
        lock.unlink()
        with locked(lock) as second:
            first.close()
            with locked(lock) as third:
                assert (second, third) == (True, False)
    assert not lock.exists()


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
