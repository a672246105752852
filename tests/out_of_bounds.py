"""Writes far past the end of a tensor, for `sanitize.py` to see whether that is seen."""

import torch
import triton
import triton.language as tl


@triton.jit
def _out_of_bounds_kernel(X):
    tl.store(X + (1 << 28) + tl.arange(0, 16), tl.zeros([16], tl.float32))


if __name__ == "__main__":
    _out_of_bounds_kernel[(1,)](torch.zeros(16, device="cuda"))
    torch.cuda.synchronize()
