"""Beam search on the device: what `decoding/beam.py` says, in kernels.

The candidates of all beams of a sentence are ranked; those that end go into the pool, the best of
the others live on, and rows trade places by the table of ancestors. Nothing is moved but these
small tables.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from writehead.kernels.beam_kernels import beam_kernel, pick_kernel, trace_kernel
from writehead.kernels.choose import Candidates, History, Limits, Rows
from writehead.kernels.launch import chained, launch


@dataclass(frozen=True, eq=False)
class Pool:
    """The best ended hypotheses of each sentence, best first: [b, beam] each.

    steps and rows: when the last token was chosen, and the row before it. tokens: that token.
    """

    scores: Tensor
    log_p: Tensor
    steps: Tensor
    rows: Tensor
    tokens: Tensor
    ended: Tensor


def choose_beam(
    logits: Tensor,
    found: Candidates,
    limits: Limits,
    rows: Rows,
    history: History,
    live: Tensor,
    pool: Pool,
    ancestors: Tensor,
    *,
    vocab_size: int,
    eos: int,
    n_best: int,
    alpha: float,
) -> None:
    """One step of beam search: `_Beams.advance` of `decoding/beam.py`, and the rows' new order.

    live: [b, beam], the log-probability of each live hypothesis. ancestors: [rows, size].
    """
    b, beam = live.shape
    parts, size = found.statistics.shape[1], ancestors.shape[1]
    chain = chained(logits)
    launch(pick_kernel, (b * beam,))(
        logits,
        logits.stride(0),
        found.largest,
        limits.clock,
        limits.min_length,
        rows.growing,
        found.logits,
        found.tokens,
        vocab_size,
        eos,
        CHUNK=found.chunk,
        CHUNKS=found.largest.shape[1],
        SIZE_N=triton.next_power_of_2(found.largest.shape[1]),
        TOP=2 * beam,
        SIZE_C=triton.next_power_of_2(2 * beam),
        CHAINED=bool(chain),
        num_warps=2,
        **chain,
    )
    launch(beam_kernel, (b,))(
        logits,
        logits.stride(0),
        found.logits,
        found.tokens,
        found.statistics,
        limits.clock,
        limits.prefix,
        limits.prefix_lengths,
        limits.max_lengths,
        rows.tokens,
        rows.lengths,
        rows.growing,
        history.tokens,
        history.parents,
        live,
        pool.scores,
        pool.log_p,
        pool.steps,
        pool.rows,
        pool.tokens,
        pool.ended,
        ancestors,
        limits.prefix.shape[1],
        vocab_size,
        eos,
        size,
        float(alpha),
        BEAM=beam,
        N_BEST=n_best,
        PARTS=parts,
        SIZE_B=triton.next_power_of_2(beam),
        SIZE_C=triton.next_power_of_2(2 * beam),
        SIZE_P=triton.next_power_of_2(parts),
        SLOTS=min(triton.next_power_of_2(size), 128),
        CHAINED=bool(chain),
        num_warps=1,
        **chain,
    )


def trace_back(history: History, pool: Pool, n_best: int) -> Tensor:
    """The texts [b, n_best, steps] of the pool's best; what is past a text's last token is not set.

    Each is followed back through its parents: so many reads one after another are quick on the
    device, and all texts are followed at the same time. An empty place must have steps of 0: its
    row may be none.
    """
    (b, beam), (most, rows) = pool.steps.shape, history.tokens.shape
    texts = torch.empty(b, n_best, most, dtype=torch.int32, device=history.tokens.device)
    launch(trace_kernel, (b * n_best,))(
        history.tokens,
        history.parents,
        pool.steps,
        pool.rows,
        pool.tokens,
        texts,
        rows,
        most,
        BEAM=beam,
        N_BEST=n_best,
        num_warps=1,
    )
    return texts
