import pytest
import torch

from helpers import config
from writehead import cost
from writehead.bench.decode import resized
from writehead.bench.floor import decode_floor
from writehead.paper.presets import preset

CPU = torch.device("cpu")


def test_the_floor_of_a_small_model_is_what_one_counts_by_hand():
    sizes = {"d": 8, "f": 16, "h": 2, "k": 4, "v": 4, "encoder_layers": 1, "decoder_layers": 1}
    small = config("translation", vocab_size=32, **sizes)
    # a byte per second, and operations for nothing: the floor is the bytes
    chip = cost.Chip("slow", 1e9, 1.0, 1e30, "made up")
    found = decode_floor(small, cost.Setting(batch=3, source=5, target=2, element=2), chip)
    weights = 8 * (8 + 4 + 4 + 8) + 8 * (8 + 8) + 2 * 8 * 16 + 32 * 8
    source = 3 * 5 * (4 + 4)
    padded, true = 3 * 2 * (4 + 4), 3 * 1.5 * (4 + 4)  # the mean of one position and two
    assert found["step_ms"]["padded"] == pytest.approx(2 * (weights + source + padded) * 1e3)
    assert found["step_ms"]["true"] == pytest.approx(2 * (weights + source + true) * 1e3)
    encoder = 8 * (8 + 4 + 4 + 8) + 2 * 8 * 16 + 8 * (4 + 4)
    assert found["encoder_ms"] == pytest.approx(2 * encoder * 1e3)


@pytest.mark.parametrize(
    ("row", "batch", "beam", "milliseconds"),
    [
        ("multi-query", 1024, 1, 0.52),
        ("multi-head-local", 1024, 1, 1.25),
        ("multi-head", 1024, 4, 5.01),
        ("multi-query", 1, 1, 0.059),
    ],
)
def test_the_floors_of_table_2_on_an_h200_are_those_published(row, batch, beam, milliseconds):
    model, setting = resized(preset(f"wmt14/{row}"), 32_768), cost.Setting(batch, 128, 128, beam)
    found = decode_floor(model, setting, cost.CHIPS["h200"])
    assert found["step_ms"]["padded"] == pytest.approx(milliseconds, rel=0.02)
    assert found["step_ms"]["true"] <= found["step_ms"]["padded"]
