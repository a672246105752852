"""The loss in one pass over the logits, against PyTorch's log_softmax in float64."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

label_losses = pytest.importorskip("writehead.kernels.label_loss", reason="Triton is not installed")

pytestmark = [
    pytest.mark.usefixtures("interpreted"),
    # in the kernels minus infinity is a number like others
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def expected(logits: Tensor, labels: Tensor, smoothing: float, z: float) -> tuple[Tensor, Tensor]:
    counts = labels >= 0
    log_p = logits.log_softmax(-1)
    nll = -log_p.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    objective = (1 - smoothing) * nll - smoothing * log_p.mean(-1)
    objective = objective + z * logits.logsumexp(-1).square()
    return objective * counts, nll * counts


@pytest.fixture(params=[7, 64, 300])
def case(request, monkeypatch) -> tuple[Tensor, Tensor]:
    monkeypatch.setattr(label_losses, "WHOLE", 128)  # so that the last size takes three pieces
    monkeypatch.setattr(label_losses, "PART", 64)
    logits = 5 * torch.randn(6, request.param, device=DEVICE)
    return logits, torch.tensor([0, request.param - 1, -100, 3, 5, -1], device=DEVICE)


@pytest.mark.parametrize(("smoothing", "z"), [(0.0, 0.0), (0.1, 1e-2)])
def test_both_losses_and_their_gradients_are_those_of_log_softmax(case, smoothing, z):
    logits, labels = case
    exact = logits.double().requires_grad_()
    right = expected(exact, labels, smoothing, z)
    logits.requires_grad_()
    found = label_losses.label_loss(logits, labels, smoothing, z)
    weights = torch.randn(2, len(labels), device=DEVICE)
    for ours, true in zip(found, right, strict=True):
        assert_close(ours.double(), true, rtol=1e-5, atol=1e-5)

    [gradient] = torch.autograd.grad(found, logits, list(weights))
    [true] = torch.autograd.grad(right, exact, list(weights.double()))
    assert_close(gradient.double(), true, rtol=1e-5, atol=1e-6)
    assert (gradient[labels < 0] == 0).all()


def test_the_gradient_of_a_sum_is_one_number_for_all_rows(case):
    logits, labels = case
    exact = logits.double().requires_grad_()
    logits.requires_grad_()
    label_losses.label_loss(logits, labels, 0.1, 0.0)[0].sum().backward()
    expected(exact, labels, 0.1, 0.0)[0].sum().backward()
    assert_close(logits.grad.double(), exact.grad, rtol=1e-5, atol=1e-6)


def test_logits_far_below_the_others_are_no_harm(case):
    logits, labels = case
    logits[:, 1] = float("-inf")
    objective, nll = label_losses.label_loss(logits, labels.clamp(max=0), 0.0, 0.0)
    assert objective.isfinite().all()
    assert torch.equal(objective, nll)


def test_rows_with_a_stride_are_read_where_they_are(case):
    logits, labels = case
    wide = torch.cat([logits, torch.full_like(logits, 99.0)], dim=1)[:, : logits.shape[1]]
    for ours, right in zip(
        label_losses.label_loss(wide, labels, 0.1, 1e-3),
        label_losses.label_loss(logits, labels, 0.1, 1e-3),
        strict=True,
    ):
        assert torch.equal(ours, right)


def test_half_precision_logits_are_summed_in_float32(case):
    logits, labels = case
    half = logits.bfloat16()
    found = label_losses.label_loss(half, labels, 0.1, 1e-3)
    for ours, true in zip(found, expected(half.double(), labels, 0.1, 1e-3), strict=True):
        assert ours.dtype == torch.float32
        assert_close(ours.double(), true, rtol=1e-5, atol=1e-5)


def test_logits_whose_rows_lie_in_pieces_are_read_right(case):
    logits, labels = case
    pieces = logits.t().contiguous().t()
    assert pieces.stride(1) != 1
    for ours, right in zip(
        label_losses.label_loss(pieces, labels, 0.1, 1e-3),
        label_losses.label_loss(logits, labels, 0.1, 1e-3),
        strict=True,
    ):
        assert torch.equal(ours, right)


def test_a_label_past_the_vocabulary_is_no_number(case):
    logits, labels = case
    labels[0] = logits.shape[1]
    objective, nll = label_losses.label_loss(logits, labels, 0.1, 0.0)
    assert objective[0].isnan()
    assert nll[0].isnan()
    assert objective[1:].isfinite().all()
