"""The loss in one pass over the logits, against PyTorch's log_softmax in float64."""

import pytest
import torch
from torch import Tensor

from helpers import assert_close_in, integers, randn
from writehead.kernels import label_loss as label_losses

# the kernels compute with minus infinity
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


def expected(logits: Tensor, labels: Tensor, smoothing: float, z: float) -> tuple[Tensor, Tensor]:
    counts = labels >= 0
    log_p = logits.log_softmax(-1)
    nll = -log_p.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    objective = (1 - smoothing) * nll - smoothing * log_p.mean(-1)
    objective = objective + z * logits.logsumexp(-1).square()
    return objective * counts, nll * counts


@pytest.fixture(params=[7, 64, 300, pytest.param(32_000, marks=pytest.mark.gpu)])
def case(request, monkeypatch) -> tuple[Tensor, Tensor]:
    if request.param <= 300:
        monkeypatch.setattr(label_losses, "WHOLE", 128)  # so that 300 logits take five parts
        monkeypatch.setattr(label_losses, "PART", 64)
    return 5 * randn(6, request.param), integers(0, request.param - 1, -100, 3, 5, -1)


LAYOUTS = {
    "contiguous": lambda T: T,
    "rows with a stride": lambda T: torch.cat([T, T + 99.0], dim=1)[:, : T.shape[1]],
    "columns": lambda T: T.t().contiguous().t(),
    "float16": lambda T: T.half(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("smoothing", "z"), [(0.0, 0.0), (0.1, 1e-2)])
def test_losses_and_gradients_equal_those_of_log_softmax(case, smoothing, z, layout):
    logits, labels = LAYOUTS[layout](case[0]).requires_grad_(), case[1]
    exact = logits.detach().double().requires_grad_()
    losses = label_losses.label_loss(logits, labels, smoothing, z)
    references = expected(exact, labels, smoothing, z)
    for ours, exact_loss in zip(losses, references, strict=True):
        assert ours.dtype == torch.float32
        assert_close_in(torch.float32, ours, exact_loss, ulps=32)

    for weights in (randn(2, len(labels)), randn(1).expand(2, len(labels))):
        [dX] = torch.autograd.grad(losses, logits, list(weights), retain_graph=True)
        weights = list(weights.double())
        [exact_dX] = torch.autograd.grad(references, exact, weights, retain_graph=True)
        assert_close_in(dX.dtype, dX, exact_dX)
        assert not dX[labels < 0].any()


def test_losses_are_finite_unless_the_label_is_invalid(case):
    logits, labels = case
    logits[:, 1] = float("-inf")
    objective, nll = label_losses.label_loss(logits, labels.clamp(max=0), 0.0, 0.0)
    assert objective.isfinite().all()
    assert_close_in(torch.float32, objective, nll)
    labels[:] = integers(logits.shape[1], 0, -100, 3, 5, -1)
    for loss in label_losses.label_loss(logits, labels, 0.0, 0.0):
        assert loss.isnan().tolist() == [True] + [False] * 5
