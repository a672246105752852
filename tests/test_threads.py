"""The number of CPU threads: its default, its overrides, and how idle threads wait."""

import os

import pytest
import torch

from processes import environment, run_python
from writehead import Engine
from writehead.util.threads import SPIN_COUNT, available_cores, use_threads

V1 = "cpu/cpu.cfs"  # files of the first version of cgroups


@pytest.mark.parametrize(
    ("cores", "groups", "files", "expected"),
    [
        (8, None, {}, 8),
        (8, "0::/\n", {"cpu.max": "250000 100000"}, 3),
        (2, "0::/\n", {"cpu.max": "250000 100000"}, 2),
        (8, "0::/\n", {"cpu.max": "1000 100000"}, 1),
        (8, "0::/a/b\n", {"a/cpu.max": "400000 100000", "a/b/cpu.max": "max 100000"}, 4),
        (8, "2:cpu,cpuacct:/\n0::/\n", {f"{V1}_quota_us": "150000", f"{V1}_period_us": "50000"}, 3),
        (8, "1:cpu:/\n", {f"{V1}_quota_us": "-1", f"{V1}_period_us": "100000"}, 8),
    ],
)
def test_cgroups_limit_the_cores(monkeypatch, tmp_path, cores, groups, files, expected):
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
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    try:
        for threads, cores, expected in ((3, 1, 3), (2, 1, 2), (None, 3, 2), (None, 1, 1)):
            monkeypatch.setattr(os, "sched_getaffinity", lambda _, n=cores: set(range(n)))
            Engine.load(run, device="cpu", threads=threads)
            assert torch.get_num_threads() == expected
        use_threads(2)
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        use_threads()  # the variable was read when PyTorch was loaded
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("policy", [None, "active"])
def test_the_command_line_and_threads_are_ready_before_pytorch_loads(policy):
    code = (
        "import os, sys, writehead.cli\n"
        "from writehead.util.threads import use_threads\n"
        "use_threads(1)\n"
        "assert 'torch' not in sys.modules\n"
        "import torch\n"
        "spins = os.environ.get('GOMP_SPINCOUNT')\n"
        "print(os.environ.get('OMP_WAIT_POLICY'), spins, torch.get_num_threads())"
    )
    given = {name: value for name, value in environment().items() if "OMP" not in name}
    given |= {} if policy is None else {"OMP_WAIT_POLICY": policy}
    spins = SPIN_COUNT if policy is None else "None"
    assert run_python(code, env=given)[1].split() == [str(policy), spins, "1"]
