"""Embeddings and sinusoidal positions against loops."""

import math

import pytest
import torch
from torch import Tensor

from helpers import DTYPES, assert_close_in, integers, randn
from writehead.errors import BackendError, ShapeError
from writehead.ops.embedding import embed, sinusoidal
from writehead.util.devices import has_triton

d, vocab_size, last = 21, 13, 6
needs_triton = pytest.mark.skipif(not has_triton(), reason="Triton is not installed")
every_implementation = pytest.mark.parametrize(
    "implementation", ["reference", pytest.param("triton", marks=needs_triton), "auto"]
)


def tables(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """E and P, whose rows have a stride."""
    return tuple(randn(rows, d + 9, dtype=dtype)[:, :d] for rows in (vocab_size, last + 1))


def one(E: Tensor, P: Tensor, token: int, position: int, scale: float = 1.0) -> Tensor:
    return E[token].double() * scale + P[min(position, last)].double()


@every_implementation
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1.0, d**0.5])
def test_embed_adds_the_embeddings_of_tokens_and_positions(scale, dtype, implementation):
    E, P = tables(dtype)
    tokens, positions = integers(12, 0, 5, 0, 3, 1).view(2, 3), integers(0, last, last + 900)
    options = {"scale": scale, "implementation": implementation}
    X = embed(tokens, E, positions=positions, P=P, **options)
    rows = [
        one(E, P, token, position, scale)
        for row in tokens.tolist()
        for token, position in zip(row, positions.tolist(), strict=True)
    ]
    assert X.dtype == dtype
    assert_close_in(dtype, X, torch.stack(rows).view(2, 3, d), ulps=2)
    assert_close_in(dtype, embed(tokens, E, **options), E[tokens].double() * scale, ulps=1)


@every_implementation
@pytest.mark.parametrize("beam", [1, 3])
def test_slots_select_the_rows_to_embed(beam, implementation):
    (E, P), count = tables(), 5 * beam
    tokens = torch.randint(vocab_size, (count,), device=E.device)
    lengths = torch.randint(last + 3, (count,), device=E.device)
    slots = integers(3, 0, 4, 4, dtype=torch.int32)
    options = {"slots": slots, "beam": beam, "implementation": implementation}
    X = embed(tokens, E, positions=lengths, P=P, **options)
    rows = [slot * beam + j for slot in slots.tolist() for j in range(beam)]
    expected = [one(E, P, int(tokens[row]), int(lengths[row])) for row in rows]
    assert_close_in(torch.float32, X, torch.stack(expected), ulps=1)
    assert_close_in(torch.float32, embed(tokens, E, **options), E[tokens[rows]], ulps=1)


def test_embed_is_differentiable():
    E, P = (T.requires_grad_() for T in tables())
    tokens, positions = integers(12, 0, 0), integers(1, 1, last + 5)
    dX = randn(3, d)
    dE, dP = torch.autograd.grad(embed(tokens, E, positions=positions, P=P, scale=2.0), (E, P), dX)
    assert_close_in(torch.float32, dE[[0, 12]], 2.0 * torch.stack([dX[1] + dX[2], dX[0]]))
    assert_close_in(torch.float32, dP[[1, last]], torch.stack([dX[0] + dX[1], dX[2]]))
    assert not dE[1:12].any()


@pytest.mark.parametrize("d", [1, 2, 7, 16])
def test_sinusoidal_positions_equal_a_loop(d):
    half = (d + 1) // 2
    for p, row in enumerate(sinusoidal(600, d).tolist()):
        for j, x in enumerate(row):
            angle = p / 10000.0 ** (2 * (j % half) / d)
            assert x == pytest.approx(math.cos(angle) if j >= half else math.sin(angle), abs=1e-6)


def test_invalid_arguments_are_explained(monkeypatch):
    (E, _), tokens = tables(), integers(1, 2)
    with pytest.raises(ShapeError, match="both positions and P"):
        embed(tokens, E, positions=tokens)
    with pytest.raises(ShapeError, match=r"must be \[rows\], not \[1, 2\]"):
        embed(tokens[None], E, slots=tokens)
    with pytest.raises(BackendError, match="columns of E and P must be contiguous"):
        embed(tokens, E.T.contiguous().T, implementation="triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(BackendError, match="Triton does not run"):
        embed(tokens.cpu(), E.cpu(), implementation="triton")
