"""What a search on the device knows before its first step, set in one launch.

It is a launch of its own, and no captured graph, behind which the steps of 16 rows took 4% longer
in one process (docs/benchmarks.md, "Lessons").
"""

import triton
import triton.language as tl
from torch import Tensor

from writehead.kernels.beams import Pool
from writehead.kernels.choose import Limits, Rows
from writehead.kernels.launch import chained, hand_over, launch, wait_for_input

ROWS = 256  # that one program sets, or those of one sentence; the time of it was not seen


def begin_search(
    told: Tensor, limits: Limits, rows: Rows, log_p: Tensor, live: Tensor, pool: Pool
) -> None:
    """Begins with the sentences of `told` [4, b], and makes it zero: nobody, for the next batch.

    told: of each sentence the token to feed first, prefix and largest lengths, and positions in the
    cache; one whose largest length is 0 is not there. log_p: [rows] of greedy search, or empty.
    live: [b, beam]. What `pool` had is forgotten. The clock is 0 again.
    """
    b, beam = live.shape
    assert told.shape == (4, b)
    assert told.is_contiguous()
    size = triton.next_power_of_2(beam)
    sentences = max(1, ROWS // size)
    chain = chained(told)
    launch(_begin_kernel, (triton.cdiv(b, sentences),))(
        told,
        limits.clock,
        limits.prefix_lengths,
        limits.max_lengths,
        rows.tokens,
        rows.lengths,
        rows.growing,
        log_p,
        live,
        pool.scores,
        pool.log_p,
        pool.steps,
        b,
        beam,
        GREEDY=log_p.numel() > 0,
        SENTENCES=sentences,
        SIZE=size,
        CHAINED=bool(chain),
        num_warps=2,
        **chain,
    )


@triton.jit
def _begin_kernel(
    told,
    clock,
    prefix_lengths,
    max_lengths,
    tokens,
    lengths,
    growing,
    log_p,
    live,
    pool_scores,
    pool_log_p,
    pool_steps,
    b,
    beam,
    GREEDY: tl.constexpr,
    SENTENCES: tl.constexpr,
    SIZE: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """One program owns some sentences, with all their beams."""
    wait_for_input(CHAINED)
    hand_over(CHAINED)
    sentence = tl.program_id(0) * SENTENCES + tl.arange(0, SENTENCES)
    is_there = sentence < b
    first = tl.load(told + sentence, mask=is_there, other=0)
    forced = tl.load(told + b + sentence, mask=is_there, other=0)
    most = tl.load(told + 2 * b + sentence, mask=is_there, other=0)
    length = tl.load(told + 3 * b + sentence, mask=is_there, other=0)
    tl.debug_barrier()  # all threads have read it, in whichever order they share it out
    for i in tl.static_range(4):
        tl.store(told + i * b + sentence, tl.zeros_like(first), mask=is_there)
    tl.store(prefix_lengths + sentence, forced.to(tl.int32), mask=is_there)
    tl.store(max_lengths + sentence, most.to(tl.int32), mask=is_there)
    if tl.program_id(0) == 0:
        tl.store(clock, 0)

    which = tl.arange(0, SIZE)[None, :]
    row = sentence[:, None] * beam + which
    is_row = is_there[:, None] & (which < beam)
    zeros = tl.zeros([SENTENCES, SIZE], tl.int64)
    grows = (most > 0)[:, None].to(growing.dtype.element_ty)
    tl.store(tokens + row, first[:, None] + zeros, mask=is_row)
    tl.store(lengths + row, length[:, None] + zeros, mask=is_row)
    tl.store(growing + row, grows + zeros.to(growing.dtype.element_ty), mask=is_row)
    # all beams begin alike, so only the first may speak
    never = tl.full([SENTENCES, SIZE], float("-inf"), tl.float32)
    tl.store(live + row, tl.where(which == 0, 0.0, never), mask=is_row)
    if GREEDY:
        tl.store(log_p + row, tl.zeros_like(never), mask=is_row)
    tl.store(pool_scores + row, never, mask=is_row)
    tl.store(pool_log_p + row, never, mask=is_row)
    # a place that stays empty leads back to no earlier batch
    tl.store(pool_steps + row, zeros.to(tl.int32), mask=is_row)
