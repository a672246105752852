import pytest
import torch

from writehead.model.dropout import SharedDropout, shared_dropout


@pytest.mark.parametrize("dim", [1, 3])
def test_noise_is_alike_along_one_dimension_and_differs_along_the_others(dim):
    X = torch.ones(3, 5, 7, 11)
    Y = shared_dropout(X, 0.5, dim)
    first = Y.select(dim, 0).unsqueeze(dim)
    assert torch.equal(Y, first.expand_as(Y))
    assert 0.2 < (first == 0).float().mean() < 0.8
    assert set(Y.unique().tolist()) == {0.0, 2.0}


def test_noise_keeps_the_mean():
    X = torch.randn(4, 1, 3).expand(4, 20_000, 3)
    Y = shared_dropout(X, 0.25, dim=0)
    assert torch.allclose(Y.mean(dim=1), X.mean(dim=1), atol=0.05)


def test_there_is_no_noise_in_evaluation():
    dropout, X = SharedDropout(0.5), torch.randn(2, 3, 5)
    assert not torch.equal(dropout(X), X)
    assert torch.equal(dropout.eval()(X), X)
