"""A claim is one process's, and goes with it."""

import errno
import fcntl
import os
import signal
from contextlib import ExitStack

import pytest

from writehead.data import claim
from writehead.data.claim import claimed


def test_a_claim_is_held_by_one_and_leaves_nothing_behind(tmp_path):
    lock = tmp_path / "folder" / ".lock"
    with claimed(lock) as mine:
        with claimed(lock) as another:
            assert (mine, another) == (True, False)
        with claimed(lock) as another:  # the one who was refused took nothing away
            assert not another
    assert not list((tmp_path / "folder").iterdir())
    with claimed(lock) as mine:
        assert mine


def test_a_claim_goes_with_a_killed_process(tmp_path):
    lock, (told, tell) = tmp_path / ".lock", os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with claimed(lock) as mine:
                os.write(tell, b"1" if mine else b"0")
                signal.pause()
        finally:
            os._exit(1)  # or an error would go on through the tests, in two processes
    assert os.read(told, 1) == b"1"
    with claimed(lock) as mine:
        assert not mine
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert lock.exists()  # which is no claim
    with claimed(lock) as mine:
        assert mine
    for end in (told, tell):
        os.close(end)


def test_a_file_that_was_taken_away_after_it_was_opened_is_no_claim(tmp_path, monkeypatch):
    lock, flock = tmp_path / ".lock", fcntl.flock
    taken = []

    def late(file, how):
        if not taken:
            lock.unlink()  # as by the one before, when it ends just now
            taken.append(1)
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with claimed(lock) as mine:
        assert mine
        with claimed(lock) as another:
            assert not another


def test_a_claim_whose_file_was_removed_leaves_its_successors_alone(tmp_path):
    lock = tmp_path / ".lock"
    with ExitStack() as first, ExitStack() as second:
        assert first.enter_context(claimed(lock))
        lock.unlink()
        assert second.enter_context(claimed(lock))
        first.close()
        with claimed(lock) as third:
            assert not third
    assert not lock.exists()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EIO])
def test_a_file_system_without_locks_keeps_nobody_away(tmp_path, monkeypatch, number):
    def fail(file, how):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(claim.fcntl, "flock", fail)
    if number in claim.NO_LOCKS:
        with claimed(tmp_path / ".lock") as mine:
            assert mine
    else:
        with pytest.raises(OSError, match="Input/output"), claimed(tmp_path / ".lock"):
            pass
