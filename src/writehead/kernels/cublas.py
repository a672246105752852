"""Products by cuBLASLt itself, which PyTorch brings along: more of what it can do.

PyTorch takes the algorithm that the library thinks best, and has relu together with a bias only.
Here the library's proposals are timed, and relu costs next to nothing. Which of them is taken
decides on the time alone, since all add the same numbers in the same order. Those that would sum
over the depth in parts are left out, or, where the library's first is such, all but that one.

Proposals are timed for exactly one size within `trying`, which whoever captures a step does, and
for large products once for all of about their size. Other products take the first.
"""

import ctypes
import dataclasses
import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from writehead.errors import BackendError
from writehead.kernels.launch import is_rehearsal

PROPOSALS = 16  # that the library is asked for
MANY = 16384  # rows from which on it pays to time proposals outside of `trying`
TIMES = 4  # that each is run between two looks at the clock
PAUSE = 300_000  # ticks of the device, in which the host launches them
CACHE = 128 << 20  # bytes, more than a device's cache has
MOST_PLANS = 512  # sizes that are remembered
WORKSPACE = 32 << 20  # bytes that an algorithm may have, as many as PyTorch allows
ALIGNED = 256  # bytes, that the library supposes

# names of the library's, with its numbers for them
TYPES = {torch.bfloat16: 14, torch.float16: 2}
REAL, IN_FLOAT32 = 0, 68
TRANSPOSES_A, EPILOGUE = 3, 7
NOTHING, RELU = 1, 2
MOST_WORKSPACE = 1
TILE, SPLITS, CUSTOM, CLUSTER = 1, 2, 5, 8  # of which the last is half as wide

_is_trying: ContextVar[bool] = ContextVar("is_trying", default=False)


class _Algorithm(ctypes.Structure):
    _fields_ = (("data", c_uint64 * 8),)


class _Proposal(ctypes.Structure):
    _fields_ = (
        ("algorithm", _Algorithm),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


@dataclass(frozen=True)
class Size:
    """What a product is planned for. x_row and y_row are the distances of rows in memory."""

    rows: int
    columns: int
    depth: int
    x_row: int
    y_row: int
    dtype: torch.dtype
    relu: bool
    adds: bool


@contextmanager
def trying() -> Iterator[None]:
    """Products that are new in it are timed by each of the library's proposals."""
    token = _is_trying.set(True)
    try:
        yield
    finally:
        _is_trying.reset(token)


def product(
    X: Tensor, W: Tensor, *, relu: bool = False, out: Tensor | None = None, adds: bool = False
) -> Tensor | None:
    """X W^T, [rows, columns], through relu, in `out` where there is one: added to it if `adds`.

    X: [rows, depth]. W: [columns, depth]. None where the library cannot be asked, and in a
    rehearsal, which is no time to try anything.
    """
    if not (X.is_cuda and len(X)) or X.dtype not in TYPES or is_rehearsal() or _library() is None:
        return None
    (rows, depth), columns = X.shape, len(W)
    Y = torch.empty(rows, columns, dtype=X.dtype, device=X.device) if out is None else out
    if not (_is_plain(X) and _is_plain(Y) and W.is_contiguous() and W.data_ptr() % ALIGNED == 0):
        return None
    size = Size(rows, columns, depth, X.stride(0), Y.stride(0), X.dtype, relu, adds)
    return Y if _planner(X.device).run(size, X, W, Y) else None


def _is_plain(T: Tensor) -> bool:
    """Whether rows are in one piece each, and where the library supposes them."""
    return T.stride(1) == 1 and T.stride(0) % 8 == 0 and T.data_ptr() % ALIGNED == 0


class Plan:
    """One size of product: the library's descriptions of it, and its proposals."""

    def __init__(self, library: Any, handle: c_void_p, size: Size) -> None:
        self.size = size
        self.chosen: int | None = None  # once it was timed
        self._library, self._handle = library, handle
        self._beta = c_float(1.0 if size.adds else 0.0)
        self._work, kind = c_void_p(), TYPES[size.dtype]
        _check(library.cublasLtMatmulDescCreate(byref(self._work), IN_FLOAT32, REAL))
        for name, value in ((TRANSPOSES_A, 1), (EPILOGUE, RELU if size.relu else NOTHING)):
            setting = c_int32(value)
            _check(
                library.cublasLtMatmulDescSetAttribute(
                    self._work, name, byref(setting), c_size_t(4)
                )
            )
        # the library's matrices are by columns, so that ours are transposed
        sizes = (
            (size.depth, size.columns, size.depth),
            (size.depth, size.rows, size.x_row),
            (size.columns, size.rows, size.y_row),
        )
        self._matrices = [c_void_p() for _ in sizes]
        for matrix, (height, width, apart) in zip(self._matrices, sizes, strict=True):
            _check(
                library.cublasLtMatrixLayoutCreate(
                    byref(matrix), kind, c_uint64(height), c_uint64(width), c_int64(apart)
                )
            )
        self.proposals = self._ask()

    def _ask(self) -> list[_Proposal]:
        """What the library proposes, best first by its own estimate."""
        preference, most, count = c_void_p(), c_size_t(WORKSPACE), c_int(0)
        W, X, Y = self._matrices
        library, found = self._library, (_Proposal * PROPOSALS)()
        _check(library.cublasLtMatmulPreferenceCreate(byref(preference)))
        try:
            _check(
                library.cublasLtMatmulPreferenceSetAttribute(
                    preference, MOST_WORKSPACE, byref(most), c_size_t(8)
                )
            )
            status = library.cublasLtMatmulAlgoGetHeuristic(
                self._handle, self._work, W, X, Y, Y, preference, PROPOSALS, found, byref(count)
            )
        finally:
            library.cublasLtMatmulPreferenceDestroy(preference)
        asked = [] if status else [found[i] for i in range(count.value) if not found[i].state]
        if asked and self._setting(asked[0], SPLITS) > 1:
            return asked[:1]
        return [one for one in asked if self._setting(one, SPLITS) <= 1]

    def _setting(self, proposal: _Proposal, name: int) -> int:
        value, width = c_uint32(0), c_size_t(2 if name == CLUSTER else 4)
        self._library.cublasLtMatmulAlgoConfigGetAttribute(
            byref(proposal.algorithm), name, byref(value), width, byref(c_size_t(0))
        )
        return value.value

    def name(self, proposal: int) -> tuple[int, ...]:
        """What tells a proposal from others, also from those for other sizes."""
        settings = (TILE, CUSTOM, CLUSTER)
        return tuple(self._setting(self.proposals[proposal], setting) for setting in settings)

    def run(self, X: Tensor, W: Tensor, Y: Tensor, which: int) -> None:
        """One product by a proposal, on the stream that is current."""
        proposal = self.proposals[which]
        # from PyTorch, so that nothing else has it meanwhile
        space = torch.empty(max(1, proposal.workspace), dtype=torch.uint8, device=X.device)
        matrices, one = self._matrices, c_float(1.0)
        _check(
            self._library.cublasLtMatmul(
                self._handle,
                self._work,
                byref(one),
                c_void_p(W.data_ptr()),
                matrices[0],
                c_void_p(X.data_ptr()),
                matrices[1],
                byref(self._beta),
                c_void_p(Y.data_ptr()),
                matrices[2],
                c_void_p(Y.data_ptr()),
                matrices[2],
                byref(proposal.algorithm),
                c_void_p(space.data_ptr()),
                c_size_t(proposal.workspace),
                c_void_p(torch.cuda.current_stream(X.device).cuda_stream),
            )
        )

    def destroy(self) -> None:
        """Gives the library's memory back."""
        for matrix in self._matrices:
            self._library.cublasLtMatrixLayoutDestroy(matrix)
        self._library.cublasLtMatmulDescDestroy(self._work)


class Planner:
    """The plans of one device, and which proposals were the quickest."""

    def __init__(self, library: Any) -> None:
        self._library, self._handle = library, c_void_p()
        _check(library.cublasLtCreate(byref(self._handle)))
        self._plans: OrderedDict[Size, Plan] = OrderedDict()
        self._quickest: dict[Size, tuple[int, ...]] = {}  # of about that many rows, by name
        self._lock = threading.Lock()  # a plan that gives way must not be in use

    def run(self, size: Size, X: Tensor, W: Tensor, Y: Tensor) -> bool:
        """Whether the library could make the product, which is then in Y."""
        with self._lock:
            plan = self._plans.pop(size, None) or Plan(self._library, self._handle, size)
            self._plans[size] = plan
            if len(self._plans) > MOST_PLANS:
                self._plans.popitem(last=False)[1].destroy()
            if not plan.proposals:
                return False
            plan.run(X, W, Y, self._choose(plan, X, W, Y))
            return True

    def _choose(self, plan: Plan, X: Tensor, W: Tensor, Y: Tensor) -> int:
        """The proposal to take."""
        is_large = plan.size.rows >= MANY
        if plan.chosen is not None or len(plan.proposals) == 1:
            return plan.chosen or 0
        if not (_is_trying.get() or is_large) or torch.cuda.is_current_stream_capturing():
            return 0
        about = dataclasses.replace(plan.size, rows=plan.size.rows.bit_length())
        if is_large and about in self._quickest:
            names = [plan.name(i) for i in range(len(plan.proposals))]
            known = self._quickest[about]
            plan.chosen = names.index(known) if known in names else 0
            return plan.chosen
        if plan.size.adds:
            Y = torch.empty_strided(Y.shape, Y.stride(), dtype=Y.dtype, device=Y.device)
        # in a step the device's cache has X, and not the weight, which counts where rows are few
        weights = [W] * (TIMES + 1) if is_large else [W.clone() for _ in range(TIMES + 1)]
        count = range(len(plan.proposals))

        def by(which: int) -> Callable[[Tensor], None]:
            return lambda W: plan.run(X, W, Y, which)

        times = [[_time(by(i), weights) for i in count] for _ in range(2)]
        plan.chosen = min(count, key=lambda i: min(some[i] for some in times))
        if is_large:
            self._quickest[about] = plan.name(plan.chosen)
        return plan.chosen


def _time(work: Callable[[Tensor], None], weights: list[Tensor]) -> float:
    """Milliseconds that the device takes for `work` with each weight but the first."""
    begin: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    pause: Any = torch.cuda._sleep
    torch.empty(CACHE, dtype=torch.uint8, device=weights[0].device).zero_()
    pause(PAUSE)  # until all of it is launched
    work(weights[0])
    begin.record()
    for W in weights[1:]:
        work(W)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


@functools.cache
def _library() -> Any:
    """cuBLASLt as PyTorch has loaded it; None where it cannot be found."""
    if torch.version.cuda is None:
        return None
    try:
        return ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.partition('.')[0]}")
    except OSError:
        return None


@functools.cache
def _planner(device: torch.device) -> Planner:
    with torch.cuda.device(device):
        return Planner(_library())


def _check(status: int) -> None:
    if status:
        raise BackendError(f"cuBLASLt answers with status {status} to a product of ours")
