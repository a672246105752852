"""A lock is one process's, and goes with it."""

import errno
import fcntl
import os
import signal
from contextlib import ExitStack

import pytest

from writehead.util import locks
from writehead.util.locks import locked


def test_a_lock_is_held_by_one_and_leaves_nothing_behind(tmp_path):
    lock = tmp_path / "folder" / ".lock"
    with locked(lock) as mine:
        with locked(lock) as another:
            assert (mine, another) == (True, False)
        with locked(lock) as another:  # the one who was refused took nothing away
            assert not another
    assert not list((tmp_path / "folder").iterdir())
    with locked(lock) as mine:
        assert mine


def test_a_lock_goes_with_a_killed_process(tmp_path):
    lock, (told, tell) = tmp_path / ".lock", os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with locked(lock) as mine:
                os.write(tell, b"1" if mine else b"0")
                signal.pause()
        finally:
            os._exit(1)  # or an error would go on through the tests, in two processes
    assert os.read(told, 1) == b"1"
    with locked(lock) as mine:
        assert not mine
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert lock.exists()  # which is no lock
    with locked(lock) as mine:
        assert mine
    for end in (told, tell):
        os.close(end)


def test_a_file_that_was_taken_away_after_it_was_opened_is_no_lock(tmp_path, monkeypatch):
    lock, flock = tmp_path / ".lock", fcntl.flock
    taken = []

    def late(file, how):
        if not taken:
            lock.unlink()  # as by the one before, when it ends just now
            taken.append(1)
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with locked(lock) as mine:
        assert mine
        with locked(lock) as another:
            assert not another


def test_a_lock_whose_file_was_removed_leaves_its_successors_alone(tmp_path):
    lock = tmp_path / ".lock"
    with ExitStack() as first, ExitStack() as second:
        assert first.enter_context(locked(lock))
        lock.unlink()
        assert second.enter_context(locked(lock))
        first.close()
        with locked(lock) as third:
            assert not third
    assert not lock.exists()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EIO])
def test_a_file_system_without_locks_keeps_nobody_away(tmp_path, monkeypatch, number):
    def fail(file, how):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(locks.fcntl, "flock", fail)
    if number in locks.NO_LOCKS:
        with locked(tmp_path / ".lock") as mine:
            assert mine
    else:
        with pytest.raises(OSError, match="Input/output"), locked(tmp_path / ".lock"):
            pass
