"""A run's checksums cover its config, weights and tokenizer."""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from texts import engine, tokenizer
from writehead.errors import DamagedRun, RunError
from writehead.model import load_run, save_run
from writehead.model.checksum import CHECKSUMS

NAMES = ("config.json", "model.safetensors", "tokenizer.model")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    tokenizer().save(folder / "bpe")
    save_run(folder / "run", engine("language").model.float(), tokenizer=folder / "bpe")
    return folder / "run"


@pytest.fixture
def run(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "run"))


def change_byte(path: Path) -> None:
    content = path.read_bytes()
    last = b" " if path.suffix == ".json" else bytes([content[-1] ^ 1])  # JSON as good as before
    path.write_bytes(content[:-1] + last)


def test_sha256sum_accepts_the_checksums(run):
    lines = [f"{hashlib.sha256((run / n).read_bytes()).hexdigest()}  {n}\n" for n in NAMES]
    assert (run / CHECKSUMS).read_text() == "".join(lines)
    if shutil.which("sha256sum"):
        subprocess.run(["sha256sum", "--check", "--strict", CHECKSUMS], cwd=run, check=True)


@pytest.mark.parametrize("name", NAMES)
def test_a_changed_byte_of_any_file_is_an_error(run, name):
    change_byte(run / name)
    with pytest.raises(DamagedRun, match=f"{name} is not as it was written"):
        load_run(run)
    lines = (run / CHECKSUMS).read_text().splitlines()
    (run / CHECKSUMS).write_text("\n".join(f"{one[:64].upper()} *{one[66:]}" for one in lines))
    with pytest.raises(DamagedRun):
        load_run(run)
    (run / CHECKSUMS).unlink()  # as in a run that was made by hand
    load_run(run)


def test_the_weights_of_an_older_run_are_verified(run):
    digest = (run / CHECKSUMS).read_text().splitlines()[1]
    (run / CHECKSUMS).unlink()
    (run / "model.safetensors.sha256").write_text(f"{digest}\n")
    change_byte(run / "tokenizer.model")
    load_run(run)
    change_byte(run / "model.safetensors")
    with pytest.raises(DamagedRun, match=r"the one in model\.safetensors\.sha256"):
        load_run(run)
    save_run(run, engine("language").model, overwrite=True)
    assert sorted(os.listdir(run)) == [CHECKSUMS, *NAMES[:2]]


@pytest.mark.parametrize(
    "text", [b"", b"\xff", b"abc  model.safetensors\n", b"0" * 64 + b"  a\nx\n", b"\0" * (2 << 20)]
)
def test_a_checksum_file_without_checksums_is_an_error(run, text):
    (run / CHECKSUMS).write_bytes(text)
    with pytest.raises(RunError, match="holds no SHA-256"):
        load_run(run)
