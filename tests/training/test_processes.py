"""Two gloo processes under torchrun train as one process does with the same global batch."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from trainings import CONFIG, MODEL, SETTINGS, curve, go, last_checkpoint, weights
from writehead.model.runs import load_run

PLAIN = replace(MODEL, dropout=0.0)  # dropout's noise is each process's own
ADAMW = replace(CONFIG, optimizer="adamw", learning_rate=1e-3)

DRIVER = """
import os, signal, sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
import torch
torch.set_num_threads(1)
from writehead.training import loop
from test_processes import ADAMW, CONFIG, PLAIN
from trainings import go
from writehead.errors import WriteheadError
from writehead.training.step import Stepper

# one world for all trainings, since starting processes takes longer than they do
joined = loop.join_world("cpu")
world = joined.__enter__()
loop.join_world = lambda device: nullcontext(world)

dataset, root = map(Path, sys.argv[1:])
fsdp = replace(ADAMW, parallel="fsdp")
go(dataset, root / "adafactor-ddp", CONFIG, PLAIN)
go(dataset, root / "adamw-ddp", replace(ADAMW, accumulate=2), PLAIN)
go(dataset, root / "adamw-fsdp", replace(fsdp, accumulate=2), PLAIN)
go(dataset, root / "one-then-two", fsdp, PLAIN)
go(dataset, root / "half-fsdp", replace(fsdp, precision="bfloat16"), PLAIN)
try:
    go(dataset, root / "refused", replace(CONFIG, parallel="fsdp"), PLAIN)
except WriteheadError as error:
    (root / f"refused-{os.environ['RANK']}").write_text(str(error))
update = Stepper.update
def stop(self, batch, step):
    if step == 5 and self.world.rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    return update(self, batch, step)
Stepper.update = stop
for name, config in (("ddp-then-one", replace(ADAMW, parallel="ddp")), ("fsdp-then-one", fsdp)):
    outcome = go(dataset, root / name, config, PLAIN)
    assert (outcome.step, outcome.stopped_by) == (6, signal.SIGTERM), outcome
joined.__exit__(None, None, None)
"""


def torchrun(*arguments: object) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), *sys.path]))
    return subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node=2", *map(str, arguments)),
        ],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def assert_alike(run: Path, other: Path) -> None:
    assert len(curve(other)) > 5
    for ours, theirs in zip(curve(run), curve(other), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    for name, T in weights(other).items():
        torch.testing.assert_close(weights(run)[name], T, rtol=1e-3, atol=1e-4)


def test_two_processes_train_as_one_and_go_on_for_each_other(dataset, tmp_path, signal_at):
    for name, config in (("adafactor", CONFIG), ("adamw", ADAMW)):
        go(dataset, tmp_path / name, config, PLAIN)
    signal_at(signal.SIGTERM, 6)
    assert go(dataset, tmp_path / "one-then-two", ADAMW, PLAIN).step == 7
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER)
    done = torchrun(driver, dataset, tmp_path)
    assert done.returncode == 0, done.stderr
    assert_alike(tmp_path / "adafactor-ddp", tmp_path / "adafactor")
    for name in ("adamw-ddp", "adamw-fsdp", "one-then-two"):
        assert_alike(tmp_path / name, tmp_path / "adamw")
    for name in ("ddp-then-one", "fsdp-then-one"):
        assert go(dataset, tmp_path / name, ADAMW, PLAIN).step == CONFIG.steps
        assert_alike(tmp_path / name, tmp_path / "adamw")
    half, whole = (curve(tmp_path / name)[-1]["dev_ln_ppl"] for name in ("half-fsdp", "adamw"))
    assert half == pytest.approx(whole, rel=1e-2)
    assert half != whole
    for rank in range(2):
        refusal = (tmp_path / f"refused-{rank}").read_text()
        assert "use parallel=ddp, or optimizer=adamw" in refusal
    one, two = (set(last_checkpoint(tmp_path / name).iterdir()) for name in ("adamw", "adamw-fsdp"))
    assert {path.name for path in one} == {path.name for path in two}
    assert load_run(last_checkpoint(tmp_path / "adamw-fsdp")).tokenizer is not None
    place = json.loads((last_checkpoint(tmp_path / "adamw-fsdp") / "training.json").read_text())
    other = json.loads((last_checkpoint(tmp_path / "adamw") / "training.json").read_text())
    assert place["data"] == other["data"]


def test_the_same_command_runs_under_torchrun(dataset, tmp_path):
    command = ["-m", "writehead", "train", dataset, "--preset=tiny/multi-query", "--device=cpu"]
    settings = [*SETTINGS, "--set=model.dropout=0"]
    done = torchrun(*command, "--into", tmp_path / "run", *settings)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("is ready: trained, 11 steps") == 1
    go(dataset, tmp_path / "whole", model=PLAIN)
    assert_alike(tmp_path / "run", tmp_path / "whole")
