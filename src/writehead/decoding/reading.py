"""What a search on the device has found, read back to the host as hypotheses."""

import numpy as np
import torch
from torch import Tensor

from writehead.config import DecodeConfig
from writehead.decoding.buffers import Buffers
from writehead.decoding.search import Constraints, Hypothesis, length_penalty, make_hypothesis
from writehead.kernels.choose import NEVER


def read_greedy(
    buffers: Buffers,
    sentences: Tensor,
    texts: list[list[int]],
    constraints: Constraints,
    config: DecodeConfig,
) -> list[list[Hypothesis]]:
    """What greedy search found for some sentences, of which `texts` has all chosen tokens."""
    tokens = buffers.history.tokens[: len(texts[0]), sentences]
    limits = buffers.limits.max_lengths[sentences]
    steps = torch.arange(len(tokens), device=tokens.device).unsqueeze(1)
    first = torch.where(tokens == constraints.end, steps, len(tokens)).amin(dim=0)
    ended = first < limits
    lengths = torch.where(ended, first + 1, limits).cpu()
    totals = buffers.log_p[sentences].cpu()
    scores = totals / length_penalty(lengths, config.alpha)
    return [
        [make_hypothesis(*one)]
        for one in zip(
            texts, lengths.tolist(), scores.tolist(), totals.tolist(), ended.tolist(), strict=True
        )
    ]


def read_beams(
    buffers: Buffers, sentences: Tensor, constraints: Constraints, config: DecodeConfig
) -> list[list[Hypothesis]]:
    """The n_best of some sentences, each followed back through its parents."""
    pool = buffers.pool
    scores, log_p, steps, rows, last, ended = (
        T[sentences, : config.n_best].cpu().numpy()
        for T in (pool.scores, pool.log_p, pool.steps, pool.rows, pool.tokens, pool.ended)
    )
    taken = int(buffers.limits.clock)
    tokens = buffers.history.tokens[:taken].cpu().numpy()
    parents = buffers.history.parents[:taken].cpu().numpy()
    texts = np.zeros((*scores.shape, taken), dtype=np.int64)
    np.put_along_axis(texts, steps[..., None].astype(np.int64), last[..., None], axis=2)
    for t in reversed(range(taken)):
        is_before = t < steps
        at = np.where(is_before, rows, 0)
        texts[..., t] = np.where(is_before, tokens[t, at], texts[..., t])
        rows = np.where(is_before, parents[t, at], rows)
    return [
        [
            make_hypothesis(
                texts[i, j].tolist(),
                int(steps[i, j]) + 1,
                float(scores[i, j]),
                float(log_p[i, j]),
                bool(ended[i, j]),
            )
            for j in range(scores.shape[1])
            if j == 0 or scores[i, j] != NEVER  # a sentence without any is an error, raised there
        ]
        for i in range(len(scores))
    ]
