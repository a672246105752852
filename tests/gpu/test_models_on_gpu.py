"""Models on a CUDA device: forward passes, single steps and captured steps."""

import pytest
import torch
from torch import Tensor

from helpers import assert_at_most_twice, assert_close_in, config, model, step_through, tokens
from writehead.model import DecoderState, LanguageModel, TranslationModel

pytestmark = pytest.mark.gpu

b, m, n = 2, 11, 9
Model = TranslationModel | LanguageModel

every_task = pytest.mark.parametrize("task", ["translation", "language"])
every_window = pytest.mark.parametrize("window", [None, 4])


def on_gpu(task: str, dtype: torch.dtype = torch.float32, **changes: object) -> Model:
    return model(config(task, d=32, k=16, v=16, **changes), dtype=dtype).cuda()


def forward(made: Model, source: Tensor, fed: Tensor) -> Tensor:
    return made(source, fed) if isinstance(made, TranslationModel) else made(fed)


def start(made: Model, source: Tensor, fed: Tensor, **options: object) -> DecoderState:
    prompt = source if isinstance(made, TranslationModel) else fed[:, :1]
    return made.start(prompt, n, **options)


def assert_near(found: Tensor, right: Tensor) -> None:
    assert_close_in(torch.float32, found, right, ulps=1024)  # through all layers


@every_task
@every_window
@pytest.mark.parametrize("g", [6, 2, 1])
def test_steps_equal_one_forward_pass_and_that_of_the_cpu(g, window, task):
    made = on_gpu(task, g=g, window=window)
    source, fed = tokens(b, m).cuda(), tokens(b, n).cuda()
    right = forward(made, source, fed)
    for rewindable in (0, n):  # a ring where there is a window, and a whole cache
        state = start(made, source, fed, rewindable=rewindable)
        assert_near(step_through(made, fed, state), right)
    assert_near(right.cpu(), forward(made.cpu(), source.cpu(), fed.cpu()))


@every_task
@every_window
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_steps_in_low_precision_err_at_most_twice_as_much_as_forward(dtype, window, task):
    made, exact = on_gpu(task, dtype, window=window), on_gpu(task, torch.float64, window=window)
    exact.load_state_dict(made.state_dict())
    source, fed = tokens(b, m).cuda(), tokens(b, n).cuda()
    stepped = step_through(made, fed, start(made, source, fed))
    assert_at_most_twice(stepped, forward(made, source, fed), forward(exact, source, fed))


@every_task
@every_window
def test_a_captured_step_replays_with_the_logits_of_forward(window, task):
    made = on_gpu(task, window=window)
    source, fed = tokens(b, m).cuda(), tokens(b, n).cuda()
    state = start(made, source, fed, padded=True, rewindable=3)
    buffer = torch.zeros(state.rows, dtype=torch.long, device="cuda")
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(2):
            made.step(buffer, state)
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = made.step(buffer, state)
    # capturing runs nothing, yet the host counts it as a step
    state.cache.rewind(3)
    state.cache.lengths.zero_()

    replayed = []
    for column in fed.unbind(1):
        buffer.copy_(column)
        graph.replay()
        replayed.append(logits.clone())
    assert_near(torch.stack(replayed, dim=1), forward(made, source, fed))
    assert state.positions.tolist() == [n] * b
