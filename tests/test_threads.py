"""The number of CPU threads: its default, its overrides, and how idle threads wait."""

import os
import subprocess
import sys

import pytest
import torch
from typer.main import get_command

from texts import save_small_runs
from writehead import Engine
from writehead.cli import app
from writehead.errors import ConfigError
from writehead.util.threads import available_cores, use_threads


@pytest.mark.parametrize(
    ("cores", "groups", "files", "expected"),
    [
        (8, None, {}, 8),
        (8, "0::/\n", {"cpu.max": "max 100000"}, 8),
        (8, "0::/\n", {"cpu.max": "250000 100000"}, 3),
        (2, "0::/\n", {"cpu.max": "250000 100000"}, 2),
        (8, "0::/\n", {"cpu.max": "1000 100000"}, 1),
        (8, "0::/a/b\n", {"a/cpu.max": "400000 100000", "a/b/cpu.max": "max 100000"}, 4),
        (
            8,
            "3:cpuset:/\n2:cpu,cpuacct:/a\n0::/\n",
            {"cpu/a/cpu.cfs_quota_us": "150000", "cpu/a/cpu.cfs_period_us": "50000"},
            3,
        ),
        (8, "1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
    ],
)
def test_affinity_and_cgroups_limit_the_cores(
    monkeypatch, tmp_path, cores, groups, files, expected
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    if groups is not None:
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert available_cores(tmp_path) == expected


def test_the_number_of_threads_is_set_and_never_raised_by_default(tmp_path, monkeypatch):
    run, before = save_small_runs(tmp_path)[0], torch.get_num_threads()
    try:
        Engine.load(run, device="cpu", threads=3)
        assert torch.get_num_threads() == 3
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        use_threads()
        assert torch.get_num_threads() == 3
        use_threads(2)
        assert torch.get_num_threads() == 2
        monkeypatch.delenv("OMP_NUM_THREADS")
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
        Engine.load(run, device="cpu")
        assert torch.get_num_threads() == 1
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2}, raising=False)
        use_threads()
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [0, 1025, 10**400, True, "2"])
def test_an_invalid_number_of_threads_is_an_error(threads):
    with pytest.raises(ConfigError, match="must be an integer from 1 to 1024") as caught:
        use_threads(threads)
    assert len(str(caught.value)) < 100


@pytest.mark.parametrize("policy", [None, "active"])
def test_threads_are_set_before_pytorch_loads(policy):
    code = (
        "import os, sys, writehead\n"
        "from writehead.util.threads import use_threads\n"
        "use_threads(1)\n"
        "assert 'torch' not in sys.modules\n"
        "import torch\n"
        "print(os.environ['OMP_WAIT_POLICY'], torch.get_num_threads())"
    )
    environment = {name: value for name, value in os.environ.items() if "OMP_" not in name}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path)}
    if policy is not None:
        environment["OMP_WAIT_POLICY"] = policy
    done = subprocess.run([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE)
    assert done.stdout.decode().split() == [policy or "passive", "1"]


def test_every_command_that_computes_takes_threads(writehead):
    verbs = get_command(app).commands
    computing = [verbs[name] for name in verbs if name not in ("bench", "presets", "explain")]
    computing += verbs["bench"].commands.values()
    without = {
        verb.name for verb in computing if not any("--threads" in p.opts for p in verb.params)
    }
    assert without == {"report", "plot"}
    code, out, err = writehead("translate", "--threads", "0")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "threads=0 must be" in err
