"""Ray on this machine: workers that are killed and replaced, and BatchTranslator in Ray Data."""

import os
import secrets
import sys
from pathlib import Path

import pytest
import torch

from jobs import Upper, complete, open_in, plan
from texts import sentences
from writehead.bench.translate import TranslateJob, measure_ray_data
from writehead.bulk import BatchTranslator, cluster
from writehead.bulk.pool import PoolSpec
from writehead.bulk.translator import Translation
from writehead.config import DecodeConfig
from writehead.errors import RunError

ray = pytest.importorskip("ray", reason="needs Ray")

LINES = [f"{i} {line}" for i, line in enumerate(sentences(30))]


@pytest.fixture(scope="module", autouse=True)
def _local_cluster(tmp_path_factory):
    """Starts Ray with two cores; workers have the import path of this process."""
    token = tmp_path_factory.mktemp("ray") / "token"  # otherwise, Ray writes one to the home folder
    token.write_text(secrets.token_hex(32))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        patch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
        for name in ("RAY_ADDRESS", "RAY_AUTH_MODE"):  # Ray sets the second one
            patch.setenv(name, "")
            patch.delenv(name)
        patch.setattr(cluster, "LOCAL_OPTIONS", {**cluster.LOCAL_OPTIONS, "num_cpus": 2})
        with cluster.connected():
            yield
    assert not ray.is_initialized()


def test_a_local_cluster_listens_only_on_the_loopback_interface():
    assert [node["NodeManagerAddress"] for node in ray.nodes()] == ["127.0.0.1"]


def test_a_killed_actor_is_replaced_and_its_shard_repeated(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("\n".join(LINES))
    job = open_in(Path("out"), "a.txt", plan(9))
    deadly = Upper((LINES[4], LINES[20]), tmp_path)
    spec = PoolSpec([lambda: cluster.RayWorker(deadly, 1, 0)] * 2, on_cpu=True)
    reports = complete(job, spec)
    assert len([*tmp_path.glob("died at *")]) == 2
    assert (job.output / "a.txt").read_text() == "\n".join(LINES).upper() + "\n"
    assert reports[-1] == len(LINES)


def test_threads_set_the_cores_per_worker():
    for threads, workers in ((None, 1), (1, 2), (2, 1)):
        assert len(cluster.ray_workers(Translation(threads=threads)).factories) == workers
    with pytest.raises(RunError, match="no machine of the Ray cluster has 3 cores"):
        cluster.ray_workers(Translation(threads=3))


def test_a_ray_dataset_is_translated_in_batches(small_runs):
    options = {"run": str(small_runs / "translation"), "options": DecodeConfig(beam=1)}
    rows = [{"text": line, "id": i} for i, line in enumerate(LINES[:8])]
    dataset = ray.data.from_items(rows).map_batches(
        BatchTranslator,
        fn_constructor_kwargs=options,
        batch_size=3,
        compute=ray.data.ActorPoolStrategy(size=1),
    )
    found = sorted(dataset.take_all(), key=lambda row: row["id"])
    assert [row["text"] for row in found] == LINES[:8]
    expected = BatchTranslator(**options)({"text": LINES[:8]})["translation"]
    assert [row["translation"] for row in found] == expected
    # a benchmark times all batches but the first
    place = {"device": torch.device("cpu"), "dtype": torch.float32, "repeats": 1, "peers": False}
    job = TranslateJob(small_runs / "translation", LINES[:8], beams=(1,), map_batches=3, **place)
    timed = measure_ray_data(job, 3, {"greedy": expected})["searches"]["greedy"]
    assert timed["equal_lines"] == 8
    assert 0 < timed["lines"] < 8
    assert timed["sentences_per_second"] == pytest.approx(timed["lines"] / timed["seconds"])
