"""Workers in other processes: same output, replaced when they die, ended with their parent."""

import os
import select
import signal
import subprocess
import sys
import threading
from functools import partial

import pytest

from jobs import Upper, complete, open_in, plan
from processes import environment
from texts import sentences
from writehead.bulk.job import Job
from writehead.bulk.pool import PoolSpec, WorkerDied, WorkerPool
from writehead.bulk.processes import ProcessWorker, device_names, process_workers
from writehead.bulk.translator import Translation
from writehead.bulk.worker import Worker
from writehead.errors import ConfigError, RunError

LINES = [f"{i} {line}" for i, line in enumerate(sentences(30))]


def processes(*loaders: Upper) -> PoolSpec:
    return PoolSpec([partial(ProcessWorker, loader) for loader in loaders], on_cpu=True)


@pytest.fixture
def job(tmp_path):
    (tmp_path / "a.txt").write_text("\n".join(LINES))
    return open_in(tmp_path / "out", tmp_path / "a.txt", plan(9))


def test_a_worker_that_dies_is_replaced_and_its_shard_repeated(job, tmp_path):
    deadly = Upper((LINES[0], LINES[8], LINES[29]), tmp_path)
    reports = complete(job, processes(deadly, deadly))
    assert len([*tmp_path.glob("died at *")]) == 3
    assert (job.output / "a.txt").read_text() == "\n".join(LINES).upper() + "\n"
    assert reports[-1] == len(LINES)


def test_a_shard_that_kills_every_worker_is_an_error_and_others_are_kept(job, monkeypatch):
    monkeypatch.setattr("writehead.bulk.pool.MAX_DEATHS", 2)
    with pytest.raises(RunError, match=r"2 workers have died .* shard 8 \(lines 27 to 30\)"):
        complete(job, processes(Upper((LINES[29],))))
    assert [*map(job.is_finished, job.shards)] == [True] * 8 + [False]


class Stuck(Worker):
    """A worker on a machine that is lost: the cluster never starts it."""

    def __init__(self) -> None:
        super().__init__(Upper())
        self.closed = threading.Event()

    def start(self, job: Job) -> None:
        self.closed.wait()
        raise WorkerDied

    def close(self) -> None:
        self.closed.set()


def test_a_job_does_not_wait_for_a_worker_that_cannot_start(job):
    spec = PoolSpec([lambda: Worker(Upper()), Stuck], on_cpu=True)
    complete(job, spec)
    assert (job.output / "a.txt").read_text() == "\n".join(LINES).upper() + "\n"


class Fails(Upper):
    def load(self) -> Upper:
        raise RunError("there is no model")


class Dies(Upper):
    def load(self) -> Upper:
        os._exit(3)


def test_a_model_that_cannot_be_loaded_is_an_error(job, monkeypatch):
    with WorkerPool(processes(Fails())) as pool, pytest.raises(RunError, match="there is no model"):
        pool.identity()
    monkeypatch.setattr("writehead.bulk.pool.MAX_DEATHS", 2)
    with WorkerPool(processes(Dies())) as pool, pytest.raises(RunError, match="2 workers"):
        pool.identity()


PARENT = """
import sys, time
from jobs import Upper
from writehead.bulk.processes import ProcessWorker

worker = ProcessWorker(Upper())
worker.identity()
print(worker.process.pid, flush=True)
sys.stdin.read()
"""


def test_workers_end_with_a_killed_parent():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", PARENT], env=environment(), **pipes) as parent:
        pid = int(parent.stdout.readline())
        descriptor = os.pidfd_open(pid)
        parent.send_signal(signal.SIGKILL)
        assert select.select([descriptor], [], [], 60)[0]
        os.close(descriptor)


@pytest.mark.parametrize("text", ["", "cpu,", "gpu", "cuda:99", "99", "cpu:1", "-1", "0 1"])
def test_unknown_devices_are_errors(text):
    with pytest.raises(ConfigError, match="device"):
        device_names(text)


def test_gpus_are_not_initialized_by_the_main_process(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda._lazy_init", lambda: pytest.fail("initializes a GPU"))
    assert device_names("all") == device_names("0,cuda:1") == ["cuda:0", "cuda:1"]
    assert not process_workers(Translation(threads=1), ["cuda:0", "cuda:1"]).on_cpu
    with pytest.raises(ConfigError, match=r"cuda:2 is not available; .* is 2"):
        device_names("1,2")


def test_a_device_can_be_listed_twice():
    assert device_names("cpu,cpu") == ["cpu", "cpu"]
