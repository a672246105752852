"""Attention by PyTorch's FlexAttention: rows packed with sentences skip the blocks between them.

Training on a GPU is its place. It is a kernel that `torch.compile` writes, so outside of a
compiled function it would compute every pair.
"""

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from writehead.kernels.visibility import Visibility

FEW = 64  # queries under which a kernel made for whole sequences has nothing to do
# positions to a side of the blocks that are skipped or computed; 64 would skip more, but did
# not compile with PyTorch 2.11 in the two ways that were tried (docs/benchmarks.md)
BLOCK = 128


def supports(Q: Tensor, K: Tensor, V: Tensor, visibility: Visibility) -> str | None:
    """None, or the sentence that says why FlexAttention is not for this."""
    if Q.device.type != "cuda" or not torch.compiler.is_compiling():
        return "FlexAttention works inside torch.compile on a GPU"
    if Q.shape[2] < FEW:
        return f"FlexAttention is for whole sequences; there are {Q.shape[2]} queries a row"
    if visibility.query_segments is None or visibility.memory_segments is None:
        return "FlexAttention is for packed rows, and these have no segments"
    if visibility.query_positions is not None or visibility.memory_positions is not None:
        return "FlexAttention takes positions in their order, and these are given"
    for name, size in (("k", K.shape[3]), ("v", V.shape[3])):
        if size < 16 or size & (size - 1):
            return f"FlexAttention needs {name} to be a power of two from 16; it is {size}"
    return None


def attend(Q: Tensor, K: Tensor, V: Tensor, visibility: Visibility, scale: float) -> Tensor:
    """[b,h,n,k] [b,g,m,k] [b,g,m,v] -> [b,h,n,v]."""
    readers, memory = visibility.query_segments, visibility.memory_segments
    causal, window, lengths = visibility.causal, visibility.window, visibility.lengths
    assert readers is not None
    assert memory is not None

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = (readers[b, i] == memory[b, j]) & (readers[b, i] != 0)
        if causal:
            seen = seen & (j <= i)
        if window is not None:
            seen = seen & (j > i - window)
        if lengths is not None:
            seen = seen & (j < lengths[b])
        return seen

    b, _, n, _ = Q.shape
    blocks = create_block_mask(
        visible, b, None, n, K.shape[2], device=str(Q.device), BLOCK_SIZE=BLOCK
    )
    O = flex_attention(  # noqa: E741
        Q, K, V, block_mask=blocks, scale=scale, enable_gqa=Q.shape[1] != K.shape[1]
    )
    assert isinstance(O, Tensor)
    return O
