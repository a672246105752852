"""Kernels with a fault each, for `sanitize.py` to see whether a tool sees it.

Example: python tests/faults.py memcheck
"""

import sys

import torch
import triton
import triton.language as tl


@triton.jit
def _out_of_bounds_kernel(X):
    """Writes far past the end of X."""
    tl.store(X + (1 << 28) + tl.arange(0, 16), tl.zeros([16], tl.float32))


@triton.jit
def _racing_kernel(X):
    """All threads write one place of shared memory, and read it without waiting for each other."""
    at = tl.arange(0, 128)
    found = tl.inline_asm_elementwise(
        """{
            .shared .align 4 .b32 contended;
            st.shared.b32 [contended], $1;
            ld.shared.b32 $0, [contended];
        }""",
        constraints="=r,r",
        args=[at],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    tl.store(X + at, found.to(tl.float32))


FAULTS = {"memcheck": _out_of_bounds_kernel, "racecheck": _racing_kernel}

if __name__ == "__main__":
    FAULTS[sys.argv[1]][(1,)](torch.zeros(128, device="cuda"))
    torch.cuda.synchronize()
