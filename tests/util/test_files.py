"""Files and folders appear complete or not at all, and nobody's work is replaced unasked."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from writehead.util.files import atomic_directory, atomic_file, write_file

KILLED = """
import os, signal, sys
from pathlib import Path
from writehead.util.files import atomic_directory, atomic_file
with {make}(Path(sys.argv[1])):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_appears_when_it_is_complete_and_an_error_keeps_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with atomic_file(path) as file:
        file.write(b"old")
        assert not path.exists()
    with pytest.raises(ZeroDivisionError), atomic_file(path) as file:
        file.write(b"new")
        raise ZeroDivisionError
    assert path.read_text() == "old"
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("linkable", [True, False])
def test_the_first_of_two_writers_of_a_new_file_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, linkable: bool
) -> None:
    if not linkable:  # a file system without hard links

        def refuse(*_: object) -> None:
            raise PermissionError(1, "Operation not permitted")

        monkeypatch.setattr(os, "link", refuse)
    path = tmp_path / "out"
    with pytest.raises(FileExistsError), atomic_file(path, replace=False) as second:
        second.write(b"second")
        write_file(path, "first", replace=False)
    assert path.read_text() == "first"
    assert names(tmp_path) == ["out"]


def test_the_first_of_two_writers_of_a_new_folder_wins(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with pytest.raises(FileExistsError), atomic_directory(path) as second:
        (second / "name").write_text("second")
        with atomic_directory(path) as first:
            (first / "name").write_text("first")
    assert (path / "name").read_text() == "first"
    assert names(tmp_path) == ["out"]


def test_a_folder_is_replaced_whole(tmp_path: Path) -> None:
    path, link = tmp_path / "out", tmp_path / "link"
    link.symlink_to(path)
    for content in ("old", "new"):
        with atomic_directory(link, replace=True) as fresh:
            (fresh / content).write_text(content)
    assert names(path) == ["new"]
    assert names(tmp_path) == ["link", "out"]
    assert link.is_symlink()


@pytest.mark.parametrize("make", ["atomic_file", "atomic_directory"])
def test_the_next_writer_removes_what_a_killed_one_left(tmp_path: Path, make: str) -> None:
    path = tmp_path / "out"
    killed = subprocess.run([sys.executable, "-c", KILLED.format(make=make), str(path)])
    assert killed.returncode == -signal.SIGKILL
    assert len(names(tmp_path)) == 1
    other = tmp_path / ".out.txt.01234567.tmp"  # of another place
    other.touch()
    write_file(path, "whole")
    assert names(tmp_path) == [other.name, "out"]


def test_work_in_progress_is_not_taken_for_a_leftover(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with atomic_file(path) as first:
        first.write(b"first")
        write_file(path, "second")
    assert path.read_text() == "first"


def test_files_have_the_permissions_of_new_files(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    write_file(tmp_path / "ours", "")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_long_name_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / ("ü" * 127)
    write_file(path, "whole")
    assert path.read_text() == "whole"


def test_hidden_names_of_another_user_and_links_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_loop_of_links_is_an_os_error(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="symbolic links"):
        write_file(tmp_path / "loop", "whole")
