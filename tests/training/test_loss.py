import pytest
import torch
from torch.nn.functional import cross_entropy, log_softmax, one_hot

from writehead.training.loss import sequence_loss

b, n, vocabulary = 2, 5, 7


@pytest.fixture
def case():
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(b, n, vocabulary, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, vocabulary, (b, n), generator=generator)
    counts = torch.tensor([[True, True, True, False, False], [True, True, True, True, False]])
    return logits.float(), labels, counts


def test_the_plain_loss_is_the_sum_of_cross_entropies_that_count(case):
    logits, labels, counts = case
    loss = sequence_loss(logits, labels, counts, label_smoothing=0.0, z_loss=0.0)
    expected = cross_entropy(logits[counts], labels[counts], reduction="sum")
    torch.testing.assert_close(loss.nll, expected)
    torch.testing.assert_close(loss.objective, expected)


@pytest.mark.parametrize(("smoothing", "z"), [(0.1, 0.0), (0.0, 1e-2), (0.3, 1e-2)])
def test_smoothing_and_z_loss_are_soft_labels_and_the_square_of_log_z(case, smoothing, z):
    logits, labels, counts = case
    loss = sequence_loss(logits, labels, counts, label_smoothing=smoothing, z_loss=z)
    soft = (1 - smoothing) * one_hot(labels, vocabulary) + smoothing / vocabulary
    each = -(soft * log_softmax(logits, dim=-1)).sum(-1) + z * logits.logsumexp(-1) ** 2
    torch.testing.assert_close(loss.objective, each[counts].sum())
    torch.testing.assert_close(
        loss.nll, cross_entropy(logits[counts], labels[counts], reduction="sum")
    )


def test_labels_that_do_not_count_have_no_gradient(case):
    logits, labels, counts = case
    logits = logits.requires_grad_()
    sequence_loss(logits, labels, counts, label_smoothing=0.1, z_loss=1e-4).objective.backward()
    assert (logits.grad[~counts] == 0).all()
    assert (logits.grad[counts] != 0).any(dim=-1).all()


def test_the_loss_of_half_precision_logits_is_taken_in_float32(case):
    logits, labels, counts = case
    loss = sequence_loss(logits.bfloat16(), labels, counts, label_smoothing=0.1, z_loss=1e-4)
    same = sequence_loss(
        logits.bfloat16().float(), labels, counts, label_smoothing=0.1, z_loss=1e-4
    )
    assert loss.objective.dtype == torch.float32
    assert torch.equal(loss.objective, same.objective)
