"""Products by cuBLASLt itself, which PyTorch brings along: more of what it can do.

PyTorch takes one algorithm of the library's choice, and has relu together with a bias only. Here
the library's proposals are timed, and relu costs next to nothing. Which of them is taken decides on
the time alone: one whose result differs from the first's in any bit that is looked at is left out.
So are all that would sum over the depth in parts, unless the library's first is such, which stays.

Proposals are timed within `trying`, which whoever captures a step does, and large products
elsewhere too, once for all of about their size. Other products stay PyTorch's, which asks less of
the host.
"""

import ctypes
import dataclasses
import functools
import logging
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

PROPOSALS = 8  # that the library is asked for; when asked for 64 it made no more
MANY = 16384  # rows from which on it pays to time proposals outside of `trying`
TIMES = 4  # that each is run between two looks at the clock: some tens of microseconds or more
PAUSE = 300_000  # ticks of the device, some 0.15 ms, in which the host launches them
CACHE = 128 << 20  # bytes, more than a device's cache has
MOST_PLANS = 512  # sizes that are remembered
WORKSPACE = 32 << 20  # bytes that an algorithm may have, as PyTorch allows on a Hopper GPU
LOOKED_AT = 1024  # rows of a result, about, that are compared
ALIGNED = 256  # bytes, that the library supposes

# names of the library's, with its numbers for them
TYPES = {torch.bfloat16: 14, torch.float16: 2}
REAL, IN_FLOAT32 = 0, 68
TRANSPOSES_A, EPILOGUE = 3, 7
NOTHING, RELU = 1, 2
MOST_WORKSPACE = 1
TILE, SPLITS = 1, 2
NAME = {0: 4, TILE: 4, 4: 4, 5: 4, 6: 4, 7: 2, 8: 2}  # what algorithms differ by, and bytes of each

log = logging.getLogger(__name__)
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

    X: [rows, depth]. W: [columns, depth]. None where it is PyTorch's to make: of a size that was
    not tried, in a rehearsal, which is no time to try it, or where the library cannot be asked.
    """
    if not (X.is_cuda and len(X)) or X.dtype not in TYPES or is_rehearsal() or _library() is None:
        return None
    (rows, depth), columns = X.shape, len(W)
    Y = torch.empty(rows, columns, dtype=X.dtype, device=X.device) if out is None else out
    assert W.shape == (columns, depth)
    assert Y.shape == (rows, columns)
    assert X.dtype == W.dtype == Y.dtype
    assert X.device == W.device == Y.device
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
        self.chosen: int | None = None  # once it was timed, or one that stands for it
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
        parts = [self._setting(one, SPLITS, 4) for one in asked]
        if asked and parts[0] > 1:
            return asked[:1]
        return [one for one, count in zip(asked, parts, strict=True) if count <= 1]

    def _setting(self, proposal: _Proposal, name: int, width: int) -> int:
        """What a proposal has for one of the library's settings; 0 where that is unknown to it."""
        value, size = c_uint32(0), c_size_t(width)
        status = self._library.cublasLtMatmulAlgoConfigGetAttribute(
            byref(proposal.algorithm), name, byref(value), size, byref(c_size_t(0))
        )
        if name == SPLITS:
            _check(status)
        return value.value

    def name(self, which: int) -> tuple[int, ...]:
        """What tells a proposal from others, also among those for other sizes."""
        return tuple(self._setting(self.proposals[which], *setting) for setting in NAME.items())

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
        self._quickest: dict[Size, tuple[int, ...]] = {}  # by name; large ones by `_about`
        self._lock = threading.Lock()  # a plan that gives way must not be in use

    def run(self, size: Size, X: Tensor, W: Tensor, Y: Tensor) -> bool:
        """Whether the product was made here, and is in Y."""
        key, is_tried = _about(size), _is_trying.get() or size.rows >= MANY
        with self._lock:
            if key not in self._quickest and (
                not is_tried or torch.cuda.is_current_stream_capturing()
            ):
                return False
            plan = self._plans.pop(size, None) or Plan(self._library, self._handle, size)
            self._plans[size] = plan
            if len(self._plans) > MOST_PLANS:
                self._plans.popitem(last=False)[1].destroy()
            if not plan.proposals:
                return False
            plan.run(X, W, Y, self._choose(plan, key, X, W, Y))
            return True

    def _choose(self, plan: Plan, key: Size, X: Tensor, W: Tensor, Y: Tensor) -> int:
        """The proposal to take."""
        if plan.chosen is None:
            names = [plan.name(i) for i in range(len(plan.proposals))]
            if key not in self._quickest:
                try:
                    self._quickest[key] = names[_quickest(plan, X, W, Y)]
                except torch.OutOfMemoryError:  # trying takes more than the product does
                    return 0
            quickest = self._quickest[key]
            plan.chosen = names.index(quickest) if quickest in names else 0
        return plan.chosen


def _about(size: Size) -> Size:
    """The size that stands for one: itself, or for a large one all of up to twice as many rows."""
    rows = size.rows if size.rows < MANY else MANY << (size.rows // MANY).bit_length()
    return dataclasses.replace(size, rows=rows)


def _quickest(plan: Plan, X: Tensor, W: Tensor, Y: Tensor) -> int:
    """Which proposal takes the least time, of those with the first's result; Y is written to."""
    if len(plan.proposals) == 1:
        return 0
    if plan.size.adds:
        Y = torch.empty_strided(Y.shape, Y.stride(), dtype=Y.dtype, device=Y.device)
    # in a step the device's cache has X, and not the weight, which counts where rows are few
    is_large = plan.size.rows >= MANY
    weights = [W if is_large else W.clone() for _ in range(TIMES + 1)]

    def by(which: int) -> Callable[[Tensor], None]:
        return lambda W: plan.run(X, W, Y, which)

    def result(which: int) -> Tensor:
        if plan.size.adds:
            Y.zero_()
        plan.run(X, W, Y, which)
        return Y[:: max(1, plan.size.rows // LOOKED_AT)].view(torch.int16).clone()

    first, times = result(0), {}
    for which in range(len(plan.proposals)):
        try:
            if which == 0 or torch.equal(result(which), first):
                times[which] = min(_time(by(which), weights) for _ in range(1 if is_large else 2))
        except BackendError:  # a proposal is not a promise
            if which == 0:
                raise
    return min(times, key=lambda which: times[which])


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
    """cuBLASLt of PyTorch's version; None where it cannot be found."""
    if torch.version.cuda is None:
        return None
    name = f"libcublasLt.so.{torch.version.cuda.partition('.')[0]}"
    try:
        return ctypes.CDLL(name)
    except OSError:
        log.warning("decoding takes PyTorch's products, some of which are slower: no %s here", name)
        return None


@functools.cache
def _planner(device: torch.device) -> Planner:
    with torch.cuda.device(device):
        return Planner(_library())


def _check(status: int) -> None:
    if status:
        raise BackendError(f"cuBLASLt answers with status {status} to a product of ours")
