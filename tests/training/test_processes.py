"""Two processes under torchrun train like one with the same global batch."""

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from processes import environment
from trainings import CONFIG, MODEL, assert_alike, curve, go, last_checkpoint
from writehead.runs.folder import load_run

PLAIN = replace(MODEL, dropout=0.0)  # each process has its own dropout noise
ADAMW = replace(CONFIG, optimizer="adamw", learning_rate=1e-3)

# one world for all runs, as starting processes takes longer than training
DRIVER = """
import os, signal, sys
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from test_processes import ADAMW, CONFIG, PLAIN
from trainings import command, go
from writehead.cli import main
from writehead.errors import WriteheadError
from writehead.training import loop
from writehead.training.step import Stepper

loop.matrix_rate = lambda device, dtype: 1e9
dataset, root = map(Path, sys.argv[1:])
with loop.join_world("cpu") as world:
    loop.join_world = lambda device: nullcontext(world)
    sys.argv[1:] = map(str, command(dataset, root / "adafactor-ddp", "--set=model.dropout=0"))
    with suppress(SystemExit):
        main()
    fsdp = replace(ADAMW, parallel="fsdp")
    go(dataset, root / "adamw-ddp", replace(ADAMW, accumulate=2), PLAIN)
    go(dataset, root / "adamw-fsdp", replace(fsdp, accumulate=2), PLAIN)
    go(dataset, root / "one-then-two", fsdp, PLAIN)
    go(dataset, root / "half-fsdp", replace(fsdp, precision="bfloat16"), PLAIN)
    try:
        go(dataset, root / "refused", replace(CONFIG, parallel="fsdp"), PLAIN)
    except WriteheadError as error:
        (root / f"refused-{world.rank}").write_text(str(error))
    update = Stepper.update
    def stop(self, batch, step):
        if step == 5 and self.world.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return update(self, batch, step)
    Stepper.update = stop
    for name, config in (("ddp-then-one", ADAMW), ("fsdp-then-one", fsdp)):
        outcome = go(dataset, root / name, config, PLAIN)
        assert (outcome.step, outcome.stopped_by) == (6, signal.SIGTERM), outcome
"""


def test_two_processes_train_like_one_and_resume_each_others_runs(dataset, tmp_path, signal_at):
    for name, config in (("adafactor", CONFIG), ("adamw", ADAMW)):
        go(dataset, tmp_path / name, config, PLAIN)
    signal_at(signal.SIGTERM, 6)
    assert go(dataset, tmp_path / "one-then-two", ADAMW, PLAIN).step == 7
    (tmp_path / "driver.py").write_text(DRIVER)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    done = subprocess.run(
        [sys.executable, *launcher, tmp_path / "driver.py", dataset, tmp_path],
        env=environment(Path(__file__).parent, OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("adafactor-ddp is ready") == 1  # one process speaks for both
    for name in ("ddp-then-one", "fsdp-then-one"):
        assert go(dataset, tmp_path / name, ADAMW, PLAIN).step == CONFIG.steps
    assert_alike(tmp_path / "adafactor-ddp", tmp_path / "adafactor")
    for ours, theirs in zip(curve(tmp_path / "adamw-ddp"), curve(tmp_path / "adamw"), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    for name in ("adamw-ddp", "adamw-fsdp", "one-then-two", "ddp-then-one", "fsdp-then-one"):
        assert_alike(tmp_path / name, tmp_path / "adamw")
    half, whole = (curve(tmp_path / name)[-1]["dev_ln_ppl"] for name in ("half-fsdp", "adamw"))
    assert half == pytest.approx(whole, rel=1e-2)
    assert half != whole
    for rank in range(2):
        assert "parallel=ddp or optimizer=adamw" in (tmp_path / f"refused-{rank}").read_text()
    one, two = (last_checkpoint(tmp_path / name) for name in ("adamw", "adamw-fsdp"))
    assert {path.name for path in one.iterdir()} == {path.name for path in two.iterdir()}
    assert load_run(two).tokenizer is not None
