"""The loss of each row against PyTorch's log_softmax in float64."""

import pytest
import torch
from torch import Tensor

from helpers import assert_close_in, integers, randn
from writehead.errors import BackendError
from writehead.ops import loss
from writehead.ops.loss import label_loss
from writehead.util.devices import has_triton

# the kernels compute with minus infinity
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
needs_triton = pytest.mark.skipif(not has_triton(), reason="Triton is not installed")
every_implementation = pytest.mark.parametrize(
    "implementation", ["reference", pytest.param("triton", marks=needs_triton)]
)


def expected(logits: Tensor, labels: Tensor, smoothing: float, z: float) -> tuple[Tensor, Tensor]:
    counts = labels >= 0
    log_p = logits.log_softmax(-1)
    nll = -log_p.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    objective = (1 - smoothing) * nll - smoothing * log_p.mean(-1)
    objective = objective + z * logits.logsumexp(-1).square()
    return objective * counts, nll * counts


@pytest.fixture(params=[7, 300, pytest.param(32_000, marks=pytest.mark.gpu)])
def case(request, monkeypatch) -> tuple[Tensor, Tensor]:
    """Logits and labels; 300 logits take several chunks."""
    if request.param <= 300:
        monkeypatch.setattr(loss, "FORWARD_CHUNK", 128)
        monkeypatch.setattr(loss, "BACKWARD_CHUNK", 64)
    return 5 * randn(6, request.param), integers(0, request.param - 1, -100, 3, 5, -1)


LAYOUTS = {
    "contiguous": lambda T: T,
    "rows with a stride": lambda T: torch.cat([T, T + 99.0], dim=1)[:, : T.shape[1]],
    "columns": lambda T: T.t().contiguous().t(),
    "float16": lambda T: T.half(),
}


@every_implementation
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("smoothing", "z"), [(0.0, 0.0), (0.1, 1e-2)])
def test_losses_and_gradients_equal_those_of_log_softmax(
    case, smoothing, z, layout, implementation
):
    logits, labels = LAYOUTS[layout](case[0]).requires_grad_(), case[1]
    exact = logits.detach().double().requires_grad_()
    options = {"label_smoothing": smoothing, "z_loss": z, "implementation": implementation}
    losses = label_loss(logits, labels, **options)
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


@every_implementation
def test_losses_of_infinite_logits_are_finite_without_label_smoothing(case, implementation):
    logits, labels = case
    logits[:, 1] = float("-inf")
    options = {"label_smoothing": 0.0, "z_loss": 0.0, "implementation": implementation}
    objective, nll = label_loss(logits, labels.clamp(max=0), **options)
    assert objective.isfinite().all()
    assert_close_in(torch.float32, objective, nll)


@needs_triton
def test_labels_outside_of_the_vocabulary_and_a_missing_gpu_are_noticed(case, monkeypatch):
    logits, labels = case
    labels[0] = logits.shape[1]
    options = {"label_smoothing": 0.0, "z_loss": 0.0, "implementation": "triton"}
    for losses in label_loss(logits, labels, **options):
        assert losses.isnan().tolist() == [True] + [False] * 5
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(BackendError, match="Triton does not run on"):
        label_loss(logits.cpu(), labels.cpu(), **options)
