"""The main equalities on a CUDA device, in the precisions that decode there."""

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from helpers import config, model, step_through, tokens
from writehead.kernels import Visibility, attend
from writehead.model import DecoderState, KVCache, LanguageModel, TranslationModel

pytestmark = pytest.mark.gpu

b, m, n, beam = 2, 11, 9, 3
BACKENDS = ("sdpa", "eager")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

every_task = pytest.mark.parametrize("task", ["translation", "language"])
every_window = pytest.mark.parametrize("window", [None, 4])
Model = TranslationModel | LanguageModel


@pytest.fixture(autouse=True)
def _exact_float32():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def on_gpu(task: str, dtype: torch.dtype = torch.float32, **changes: object) -> Model:
    return model(config(task, d=32, k=16, v=16, **changes), dtype=dtype).cuda()


def forward(made: Model, source: Tensor, fed: Tensor) -> Tensor:
    return made(source, fed) if isinstance(made, TranslationModel) else made(fed)


def start(made: Model, source: Tensor, fed: Tensor, **options: object) -> DecoderState:
    prompt = source if isinstance(made, TranslationModel) else fed[:, :1]
    return made.start(prompt, n, **options)


def plain(Q: Tensor, K: Tensor, V: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention as anyone would write it, in the inputs' own precision."""
    repeats = Q.shape[1] // K.shape[1]
    K, V = (T.repeat_interleave(repeats, dim=1) for T in (K, V))
    logits = (Q @ K.transpose(-1, -2) * scale).masked_fill(~mask, -math.inf)
    return torch.softmax(logits, dim=-1).nan_to_num() @ V


def assert_at_most_twice(error: Tensor, allowed: Tensor) -> None:
    # where plain PyTorch happens to be exact, one unit in float32's last place is allowed
    assert error.max() <= 2 * allowed.max() + 1e-6
    assert error.mean() <= 2 * allowed.mean() + 1e-7


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("g", [6, 2, 1])
@pytest.mark.parametrize("queries", [1, 16])
def test_attend_errs_at_most_twice_as_much_as_plain_pytorch(queries, g, dtype, backend):
    h, memory, k = 6, 129, 32
    Q, K, V = (
        torch.randn(4, heads, size, k, device="cuda").to(dtype)
        for heads, size in ((h, queries), (g, memory), (g, memory))
    )
    lengths = torch.tensor([memory, 100, 3, 0], device="cuda")
    positions = torch.arange(queries, device="cuda").repeat(4, 1) + 90
    visibility = Visibility(causal=True, window=50, lengths=lengths, query_positions=positions)
    mask = visibility.mask(queries, memory, Q.device)
    exact = plain(Q.double(), K.double(), V.double(), mask, k**-0.5)

    O = attend(Q, K, V, visibility, scale=k**-0.5, backend=backend)  # noqa: E741

    assert O.dtype == dtype
    assert not O[3].any()
    assert_at_most_twice((O - exact).abs(), (plain(Q, K, V, mask, k**-0.5) - exact).abs())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("queries", [1, 16])
def test_a_row_that_sees_nothing_sends_no_nan_back(queries, backend):
    tensors = [
        torch.randn(2, heads, size, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for heads, size in ((6, queries), (2, 24), (2, 24))
    ]
    visibility = Visibility(lengths=torch.tensor([0, 9], device="cuda"))

    attend(*tensors, visibility, scale=0.2, backend=backend).float().square().sum().backward()

    for T in tensors:
        assert torch.isfinite(T.grad).all()
        assert not T.grad[0].any()


@every_task
@every_window
@pytest.mark.parametrize("g", [6, 2, 1])
def test_decoding_step_by_step_equals_one_forward_pass(g, window, task):
    made = on_gpu(task, g=g, window=window)
    source, fed = tokens(b, m).cuda(), tokens(b, n).cuda()

    stepped = step_through(made, fed, start(made, source, fed))

    assert_close(stepped, forward(made, source, fed), atol=1e-4, rtol=1e-4)


@every_task
def test_forward_on_the_gpu_equals_forward_on_the_cpu(task):
    made = on_gpu(task)
    source, fed = tokens(b, m), tokens(b, n)
    logits = forward(made, source.cuda(), fed.cuda()).cpu()
    assert_close(logits, forward(made.cpu(), source, fed), atol=1e-4, rtol=1e-4)


@every_task
@every_window
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_steps_in_low_precision_err_at_most_twice_as_much_as_forward(dtype, window, task):
    made, exact = on_gpu(task, dtype, window=window), on_gpu(task, torch.float64, window=window)
    exact.load_state_dict(made.state_dict())
    source, fed = tokens(b, m).cuda(), tokens(b, n).cuda()

    stepped = step_through(made, fed, start(made, source, fed))

    right = forward(exact, source, fed)
    assert_at_most_twice((stepped - right).abs(), (forward(made, source, fed) - right).abs())


@every_task
def test_a_ring_equals_a_whole_cache_under_a_window(task):
    made = on_gpu(task, window=4)
    source, fed = tokens(b, m).cuda(), tokens(b, n).cuda()
    ring, whole = start(made, source, fed), start(made, source, fed, rewindable=n)
    assert (ring.cache.size, whole.cache.size) == (4, n)

    stepped = step_through(made, fed, ring)

    assert_close(stepped, step_through(made, fed, whole), atol=1e-4, rtol=1e-4)


@every_task
@every_window
def test_reordered_beams_equal_their_own_histories(window, task):
    made = on_gpu(task, window=window)
    source, prompt = tokens(b, m).cuda(), tokens(b, n).cuda()
    state = start(made, source, prompt, beam=beam)
    source = source.repeat_interleave(beam, dim=0)
    histories = torch.empty(b * beam, 0, dtype=torch.long, device="cuda")

    for rows in ([1, 1, 0, 3, 5, 4], [2, 0, 2, 4, 4, 4], [0, 1, 2, 3, 4, 5], [2, 1, 0, 3, 3, 5]):
        fed = tokens(b * beam).cuda()
        histories = torch.cat([histories, fed.unsqueeze(1)], dim=1)
        logits = made.step(fed, state)
        assert_close(logits, forward(made, source, histories)[:, -1], atol=1e-4, rtol=1e-4)
        state.reorder(torch.tensor(rows, device="cuda"))
        histories = histories[rows]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("g", [2, 1])
@pytest.mark.parametrize("sharing", ["heads", "beams"])
def test_k_and_v_are_never_repeated_in_memory(sharing, g, backend):
    h, memory, k, beams = 16, 4096, 64, 16 if sharing == "beams" else 1
    Q = torch.randn(2 * beams, h, 1, k, device="cuda", dtype=torch.bfloat16)
    K, V = (torch.randn(2, g, memory, k, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    visibility = Visibility(lengths=torch.tensor([memory, 9], device="cuda"))
    attend(Q, K, V, visibility, scale=0.1, backend=backend)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()

    attend(Q, K, V, visibility, scale=0.1, backend=backend)

    taken = torch.cuda.max_memory_allocated() - before
    assert taken < K.nbytes * beams * h // g


def captured_step(made: Model, state: DecoderState) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
    """A graph of one step, with the token buffer it reads and the logits it leaves."""
    fed = torch.zeros(state.rows, dtype=torch.long, device="cuda")
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(2):
            made.step(fed, state)
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = made.step(fed, state)
    restart(state.cache, recorded=3)
    return graph, fed, logits


def restart(cache: KVCache, recorded: int) -> None:
    """An empty cache again: capturing runs nothing, yet the host counts it as a step."""
    cache.rewind(recorded)
    cache.lengths.zero_()


@every_task
@every_window
def test_a_captured_step_replays_with_the_logits_of_forward(window, task):
    made = on_gpu(task, window=window)
    source, fed = tokens(b, m).cuda(), tokens(b, n).cuda()
    state = start(made, source, fed, padded=True, rewindable=3)

    graph, buffer, logits = captured_step(made, state)
    replayed = []
    for column in fed.unbind(1):
        buffer.copy_(column)
        graph.replay()
        replayed.append(logits.clone())

    expected = forward(made, source, fed)
    assert_close(torch.stack(replayed, dim=1), expected, atol=1e-4, rtol=1e-4)
    assert state.positions.tolist() == [n] * b
