"""The number of CPU threads: its default, its overrides, and how idle threads wait."""

import os

import pytest
import torch
from typer.main import get_command

from processes import environment, run_python
from writehead import Engine
from writehead.cli import app
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


def test_the_number_of_threads_is_set_and_never_raised_by_default(small_runs, monkeypatch):
    run, before = small_runs / "translation", torch.get_num_threads()
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
    given = {name: value for name, value in environment().items() if "OMP_" not in name}
    given |= {} if policy is None else {"OMP_WAIT_POLICY": policy}
    assert run_python(code, env=given)[1].split() == [policy or "passive", "1"]


def test_every_command_that_computes_takes_threads():
    verbs = get_command(app).commands
    computing = [verbs[name] for name in verbs if name not in ("bench", "presets", "explain")]
    computing += verbs["bench"].commands.values()
    without = {
        verb.name for verb in computing if not any("--threads" in p.opts for p in verb.params)
    }
    assert without == {"report", "plot"}
