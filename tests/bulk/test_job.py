"""Bulk jobs: planning, resuming after any interruption, joining, and refusing changed settings."""

import errno
import gzip
import json
import os
import shutil
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs import complete, in_process, open_in, plan
from processes import killed_at
from texts import full_disk, names, sentences
from writehead.bulk import job as jobs
from writehead.bulk.job import BoundarySampler, JobMismatch
from writehead.bulk.pool import WorkerPool
from writehead.errors import DataError
from writehead.util.locks import locked

LINES = [*sentences(20), "", "the end"]


@pytest.fixture
def source(tmp_path):
    """A folder with a text file, a compressed one and an empty one."""
    folder = tmp_path / "in"
    (folder / "b").mkdir(parents=True)
    (folder / "a.txt").write_text("\n".join(LINES))
    (folder / "b" / "c.gz").write_bytes(gzip.compress("\n".join(reversed(LINES)).encode() + b"\n"))
    (folder / "empty").touch()
    return folder


def assert_translated(output) -> None:
    upper = "\n".join(LINES).upper() + "\n"
    assert (output / "a.txt").read_text() == upper
    with gzip.open(output / "b" / "c.gz", "rt") as file:
        assert file.read() == "\n".join(reversed(LINES)).upper() + "\n"
    assert (output / "empty").read_bytes() == b""
    assert names(output) == [".writehead", "a.txt", "b", "empty"]
    assert names(output / ".writehead") == ["joined", "manifest.json"]


@given(st.lists(st.integers(0, 4), max_size=60), st.integers(1, 70), st.integers(3, 20))
def test_shards_have_about_the_same_number_of_lines(sizes, shards, most):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs, "MAX_BOUNDARIES", most)
        sampler = BoundarySampler()
        for i, lines in enumerate(sizes):
            sampler.add(0, 10 * i, i, lines)
        chosen = sampler.choose(shards)
    assert [start.record for start in chosen] == sorted({start.record for start in chosen})
    assert len(chosen) <= shards
    assert [*chosen[:1]] == ([(0, 0, 0, 0)] if sizes else [])
    for start in chosen:
        assert start == (0, 10 * start.record, start.record, sum(sizes[: start.record]))
    stride = 1 if len(sizes) <= most else 2 ** (len(sizes) // most).bit_length()
    ends = [*(start.line for start in chosen[1:]), sum(sizes)][: len(chosen)]
    for start, end in zip(chosen, ends, strict=True):
        assert end - start.line <= sum(sizes) / shards + 4 * stride + 1


@pytest.mark.parametrize("shards", [1, 3, 44, 99, None])
def test_every_line_is_translated_once_and_in_order(source, tmp_path, shards):
    job = open_in(tmp_path / "out", source, plan(shards))
    reports = complete(job)
    assert_translated(tmp_path / "out")
    assert reports[-1] == job.lines() == 2 * len(LINES)
    assert complete(open_in(tmp_path / "out", source, plan(shards))) == [job.lines()]


def test_a_job_killed_at_any_moment_resumes(source, tmp_path):
    def work() -> None:
        complete(open_in(tmp_path / "out", source))

    for operation in count():
        output = tmp_path / "out"
        code = killed_at(operation, output, work)
        job = open_in(output, source)
        with WorkerPool(in_process()) as pool:
            pool.run(job, job.shards, lambda lines: None)
        assert job.join()
        assert_translated(output)
        shutil.rmtree(output)
        if code == 0:
            break
    assert operation > 30


def test_a_join_killed_at_any_moment_resumes_without_hard_links(source, tmp_path, monkeypatch):
    job = open_in(tmp_path / "out", source)
    with WorkerPool(in_process()) as pool:
        pool.run(job, job.shards, lambda lines: None)
    shutil.copytree(job.output, tmp_path / "copy")

    def link(*_: object) -> None:
        raise OSError(errno.EPERM, "no hard links")

    monkeypatch.setattr(os, "link", link)
    for operation in count():
        code = killed_at(operation, job.output, job.join)
        assert job.join()
        assert_translated(job.output)
        shutil.rmtree(job.output)
        shutil.copytree(tmp_path / "copy", job.output)
        if code == 0:
            break
    assert operation > 20


def test_finished_shards_are_not_translated_again(source, tmp_path):
    job = open_in(tmp_path / "out", source, plan(4))
    complete(job, shards=job.shards[::2])
    before = {path.name: path.stat() for path in job.folder.iterdir()}
    again = open_in(tmp_path / "out", source, plan(None))
    with WorkerPool(in_process()) as pool:
        pool.run(again, again.shards, lambda lines: None)
    after = {path.name: path.stat() for path in job.folder.iterdir()}
    assert (len(before), len(after)) == (2, 4)
    assert before.items() <= after.items()
    assert job.join()
    assert_translated(tmp_path / "out")


def test_parts_of_a_job_may_run_on_different_machines(source, tmp_path):
    opened = [open_in(tmp_path / "out", source, plan(7)) for _ in range(3)]
    for i, job in enumerate(opened):
        complete(job, shards=job.shards[i::3])
        assert job.is_joined == (i == 2)
    assert_translated(tmp_path / "out")


def test_two_processes_never_translate_the_same_shard(source, tmp_path):
    job = open_in(tmp_path / "out", source)
    [make] = in_process().factories
    worker = make()
    worker.start(job)
    with locked(job.lock(1)) as acquired:
        assert acquired
        assert worker.translate(1, print) is None
    assert not job.is_finished(1)
    complete(job)
    assert_translated(tmp_path / "out")


def test_a_process_takes_over_the_shard_of_one_that_dies(source, tmp_path, monkeypatch):
    monkeypatch.setattr("writehead.bulk.pool.RETRY_SECONDS", 0.01)
    job = open_in(tmp_path / "out", source)
    with locked(job.lock(1)) as acquired, WorkerPool(in_process()) as pool:
        assert acquired
        released = []

        def release(lines: float) -> None:
            """Releases the lock once all other shards are finished."""
            if job.is_finished(0) and job.is_finished(2) and not released:
                released.append(job.lock(1).rename(tmp_path / "released"))

        pool.run(job, job.shards, release)
    assert released
    assert job.join()
    assert_translated(tmp_path / "out")


CHANGES = {
    "another model": {"model": {"weights": "lower"}},
    "started with beam=1, not 2": {"options": {"beam": 2}},
    "started with scores=False, not True": {"format": plan(scores=True).format},
    "started with 3 shards, not 4": {"shards": 4},
}


@pytest.mark.parametrize("words", CHANGES)
@pytest.mark.parametrize("finished", [False, True])
def test_other_settings_are_refused(source, tmp_path, words, finished):
    job = open_in(tmp_path / "out", source)
    complete(job, shards=job.shards if finished else job.shards[:1])
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    changed = {**plan().__dict__, **CHANGES[words]}
    with pytest.raises(JobMismatch, match=words):
        open_in(tmp_path / "out", source, type(plan())(**changed))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_changed_input_is_refused(source, tmp_path, monkeypatch):
    output, first = tmp_path / "out", source / "a.txt"
    job = open_in(output, source)
    complete(job, shards=job.shards[:1])
    text = first.read_text()
    first.write_text(text.replace("the", "The"))
    with pytest.raises(JobMismatch, match=r"a\.txt has changed"):
        open_in(output, source)
    first.write_text(text)
    (source / "new").touch()
    with pytest.raises(JobMismatch, match="'new' was added"):
        open_in(output, source)
    (source / "new").rename(tmp_path / "new")
    (source / "empty").rename(tmp_path / "empty")
    with pytest.raises(JobMismatch, match="'empty' was removed"):
        open_in(output, source)
    (tmp_path / "empty").rename(source / "empty")
    job = open_in(output, source)
    first.write_text(text + "more\n")  # while the job runs
    with pytest.raises(DataError, match=r"a\.txt has changed"):
        complete(job)
    first.write_text(text)
    monkeypatch.setattr(jobs, "__version__", "9.9")
    with pytest.raises(JobMismatch, match="another version of writehead"):
        open_in(output, source)
    monkeypatch.undo()
    complete(open_in(output, source))
    assert_translated(output)


def test_force_starts_over(source, tmp_path):
    output = tmp_path / "out"
    job = open_in(output, source)
    complete(job, shards=job.shards[:1])
    assert open_in(output, source, force=True).is_finished(0)  # nothing has changed
    other = open_in(output, source, plan(5), force=True)
    assert not any(map(other.is_finished, other.shards))
    complete(other)
    assert_translated(output)
    (output / "a.txt").write_text("mine")
    again = open_in(output, source, force=True)
    complete(again, shards=again.shards[:1])
    assert (output / "a.txt").read_text() == "mine"
    with WorkerPool(in_process()) as pool:
        pool.run(again, again.shards, lambda lines: None)
    assert again.join(replace=True)
    assert_translated(output)
    (output / "empty").unlink()
    with pytest.raises(DataError, match="has removed the job"):
        again.join()
    with pytest.raises(JobMismatch, match="empty has been removed"):
        open_in(output, source)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('{"text": "a\\nb"}', '{"text": "abcd"}'),  # fewer lines
        ('{"text": "abcd"}', '{"text": "a\\nb"}'),  # more lines
        ('{"text": "abcd"}', 16 * "\n"),  # more records
        (16 * "\n", '\n{"text": null}\n'),  # fewer records, and the same number of lines
    ],
)
def test_input_that_changes_before_the_join_is_an_error(tmp_path, before, after):
    assert len(before) == len(after)
    source, output = tmp_path / "a.jsonl", tmp_path / "out"
    rows = "".join(f'{{"text": "{line}"}}\n' for line in LINES)
    source.write_text(rows + before)
    job = open_in(output, source)
    with WorkerPool(in_process()) as pool:
        pool.run(job, job.shards, lambda lines: None)
    source.write_text(rows + after)
    with pytest.raises(DataError, match=r"a\.jsonl has changed"):
        job.join()
    assert names(output) == [".writehead"]


def test_a_stale_job_does_not_touch_the_job_that_replaced_it(source, tmp_path):
    output = tmp_path / "out"
    stale = open_in(output, source)
    complete(stale)
    job = open_in(output, source, plan(5), force=True)
    complete(job, shards=job.shards[:2])
    assert not stale.is_joined
    with pytest.raises(DataError, match="has replaced the job"):
        stale.join(replace=True)
    assert [job.is_finished(i) for i in job.shards] == [True, True, False, False, False]
    with WorkerPool(in_process()) as pool:
        pool.run(job, job.shards, lambda lines: None)
    assert job.join(replace=True)
    assert_translated(output)
    with pytest.raises(DataError, match="has replaced the job"):
        stale.join()
    shutil.rmtree(output / ".writehead")
    with pytest.raises(DataError, match="has removed the job"):
        job.join()


def test_removed_shards_are_an_error(source, tmp_path):
    output = tmp_path / "out"
    job = open_in(output, source)
    with WorkerPool(in_process()) as pool:
        pool.run(job, job.shards, lambda lines: None)
    shutil.rmtree(job.folder)
    assert not any(map(job.is_finished, job.shards))
    with pytest.raises(DataError, match=r"shards of the job in .* have been removed"):
        job.join(replace=True)
    with pytest.raises(JobMismatch, match="have been removed"):
        open_in(output, source)
    complete(open_in(output, source, force=True))
    assert_translated(output)


def test_existing_files_are_not_replaced(source, tmp_path):
    output = tmp_path / "out"
    (output / "b").mkdir(parents=True)
    (output / "b" / "c.gz").write_text("mine")
    with pytest.raises(DataError, match=r"c\.gz exists"):
        open_in(output, source)
    assert names(output) == ["b"]
    (output / "b" / "c.gz").unlink()
    job = open_in(output, source)
    (output / "b" / "c.gz").write_text("mine")
    with pytest.raises(DataError, match=r"c\.gz has been created"):
        complete(job)
    assert (output / "b" / "c.gz").read_text() == "mine"
    (output / "b" / "c.gz").unlink()
    complete(open_in(output, source))
    assert_translated(output)


@pytest.mark.parametrize("damage", ["cut", "short", "long", "flipped", "empty"])
@pytest.mark.parametrize("shard", [0, 2])
def test_a_damaged_shard_is_named_and_translated_again_once_deleted(
    source, tmp_path, damage, shard
):
    output = tmp_path / "out"
    job = open_in(output, source)
    with WorkerPool(in_process()) as pool:
        pool.run(job, job.shards, lambda lines: None)
    path = job.path(shard)
    content, text = path.read_bytes(), gzip.decompress(path.read_bytes())
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 64
    short, long = (gzip.compress(one) for one in (text[: text.rindex(b"\n", 0, -1)], text + b"\n"))
    damaged = {"cut": content[:-9], "flipped": flipped, "short": short, "long": long, "empty": b""}
    path.write_bytes(damaged[damage])
    with pytest.raises(DataError, match=f"{path.name} is damaged"):
        job.join()
    path.unlink()
    complete(open_in(output, source))
    assert_translated(output)


@pytest.mark.parametrize(
    "change",
    [
        lambda manifest: manifest.update(starts=[[0, 0, 0]]),
        lambda manifest: manifest.update(starts=[[0, -5, 0, 0]]),
        lambda manifest: manifest["starts"].reverse(),
        lambda manifest: manifest.pop("inputs"),
        lambda manifest: manifest.update(shards=0),
        None,
    ],
)
def test_a_damaged_manifest_is_an_error(source, tmp_path, change):
    job = open_in(tmp_path / "out", source)
    path = job.home / "manifest.json"
    manifest = json.loads(path.read_text())
    if change:
        change(manifest)
    path.write_text(json.dumps(manifest) if change else path.read_text()[:-9])
    with pytest.raises(JobMismatch, match=r"manifest\.json .*; choose another folder, or start"):
        open_in(tmp_path / "out", source)
    complete(open_in(tmp_path / "out", source, force=True))
    assert_translated(tmp_path / "out")


def test_a_full_disk_is_an_error_and_keeps_finished_shards(tmp_path):
    source, output = tmp_path / "a.txt", tmp_path / "out"
    lines = [*LINES, *(f"{i * 7919 % 100_003:x}" for i in range(20_000))]
    source.write_text("\n".join(lines))
    job = open_in(output, source, plan(20))
    complete(job, shards=job.shards[:7])
    with full_disk(2000), pytest.raises(DataError, match="could not be written: File too large"):
        complete(job)
    assert names(job.folder) == [job.path(i).name for i in range(7)]
    complete(job, shards=job.shards[:-1])
    [make] = in_process().factories
    worker = make()
    worker.start(job)
    worker.translate(19, lambda lines: None)
    with full_disk(40_000), pytest.raises(OSError, match="too large"):
        job.join()
    assert names(output) == [".writehead"]
    complete(job)
    assert (output / "a.txt").read_text() == "\n".join(lines).upper() + "\n"


def test_workers_must_have_the_model_of_the_job(source, tmp_path):
    changed = {**plan().__dict__, "model": {"weights": "lower"}}
    job = open_in(tmp_path / "out", source, type(plan())(**changed))
    with pytest.raises(Exception, match="different models"):
        complete(job)
