"""`writehead quantize`: a smaller run that every command reads."""

import shutil
from operator import lt

from writehead.model.runs import read_quantization


def test_quantize_makes_a_smaller_run_and_replaces_one_if_forced(writehead, small_runs, tmp_path):
    plain, small = small_runs / "translation", tmp_path / "small"
    for options, bits, group in (
        ([], 8, None),
        (["--bits=4"], 4, 32),
        (["--bits=5", "--group=0"], 5, None),
    ):
        code, out, err = writehead("quantize", plain, small, *options, "--force")
        assert (code, out, err.count("\n")) == (0, "", 1)
        config = read_quantization(small)
        assert (config.bits, config.group) == (bits, group)
        assert lt(*((run / "model.safetensors").stat().st_size for run in (small, plain)))


def test_a_checkpoint_is_quantized_without_optimizer_state(writehead, small_runs, tmp_path):
    checkpoint = tmp_path / "training" / "checkpoints" / "step-00000007"
    shutil.copytree(small_runs / "translation", checkpoint)
    (checkpoint / "optimizer.safetensors").write_bytes(b"moments")
    code, _, err = writehead("quantize", tmp_path / "training", tmp_path / "small")
    assert (code, "step-00000007" in err) == (2, True)
    assert writehead("quantize", checkpoint, tmp_path / "small")[0] == 0
    names = sorted(path.name for path in (tmp_path / "small").iterdir())
    assert names == ["checksums.sha256", "config.json", "model.safetensors", "tokenizer.model"]
