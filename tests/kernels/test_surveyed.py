"""Logits and what is noted of them in one kernel, against both apart; interpreted without a GPU."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

choose = pytest.importorskip("writehead.kernels.choose", reason="Triton is not installed")
surveyed = pytest.importorskip("writehead.kernels.surveyed", reason="Triton is not installed")
pytestmark = pytest.mark.usefixtures("interpreted")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TILE = surveyed.SurveyTile(16, 32, 64, 4, 2)


def operands(rows: int, columns: int, depth: int = 128) -> tuple[Tensor, Tensor]:
    X, W = (torch.randn(n, depth, device=DEVICE, dtype=torch.float16) for n in (rows, columns))
    return X, W / depth**0.5


@pytest.mark.parametrize(
    ("rows", "columns", "vocabulary"),
    [(16, 32, 32), (37, 96, 96), (20, 96, 70), (5, 96, 33), (33, 96, 32)],
)
def test_it_is_the_product_and_what_a_survey_of_it_finds(rows, columns, vocabulary):
    X, W = operands(rows, columns)
    found = choose.Candidates.make(rows, vocabulary, 1, X.device, TILE.columns)
    logits = surveyed.surveyed_linear(X, W, found, TILE, vocabulary=vocabulary)
    assert_close(logits, (X.float() @ W.float().T).half(), atol=2e-3, rtol=2e-3)

    real = logits.double().clone()
    real[:, vocabulary:] = -torch.inf
    parts = -(-vocabulary // TILE.columns)
    largest = real[:, : parts * TILE.columns].view(rows, parts, -1).amax(2)
    assert torch.equal(found.largest.double(), largest)
    assert torch.equal(found.statistics[..., 0].double(), largest)
    log_z = (found.statistics[..., 1].double().log() + largest).logsumexp(1)
    assert_close(log_z, real.logsumexp(1), atol=1e-5, rtol=1e-5)


def test_logits_that_are_all_minus_infinity_are_no_number_of_their_sum():
    X, W = operands(16, 32)
    found = choose.Candidates.make(16, 32, 1, X.device, TILE.columns)
    X[3], W[:, 0] = 0.0, -torch.inf
    X[3, 0] = 1.0
    surveyed.surveyed_linear(X, W, found, TILE, vocabulary=32)
    assert found.largest[3].item() == -torch.inf
    assert found.statistics[3, 0].tolist() == [-torch.inf, 0.0]


def test_it_is_for_halves_of_many_rows_on_a_hopper_gpu(monkeypatch):
    half = torch.empty(1, dtype=torch.bfloat16)
    sizes = (1024, 1024, 32000)
    if DEVICE == "cpu":
        assert surveyed.choose_survey_tile(*sizes, half) is None
    monkeypatch.setattr(surveyed, "chained", lambda T: {"launch_pdl": True})
    assert surveyed.choose_survey_tile(*sizes, half) is not None
    assert surveyed.choose_survey_tile(*sizes, half.float()) is None
    for other in ((1023, 1024, 32000), (1024, 1000, 32000), (1024, 1024, 32001)):
        assert surveyed.choose_survey_tile(*other, half) is None
