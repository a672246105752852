"""`writehead serve` explains what it cannot do, before it serves."""

import socket

import pytest

from servers import models
from writehead.serving.run import share_memory, warm_up


@pytest.mark.usefixtures("bundled")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--served-model-name", "a", "--served-model-name", "b"], "--served-model-name"),
        (["--languages", "english"], "language pair"),
        (["--deadline", "0"], "deadline"),
        (["--host", "no.such.host.invalid"], "no.such.host.invalid"),
        (["runs/missing"], "runs/missing"),
    ],
)
def test_bad_options_are_refused(refused, options, words):
    assert words in refused("serve", "--port", 0, *options)


@pytest.mark.usefixtures("bundled")
def test_a_port_in_use_is_refused(refused):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"127.0.0.1:{port}" in refused("serve", "--port", port)


@pytest.mark.usefixtures("bundled")
def test_two_models_with_one_name_are_refused(refused, small_runs):
    run = small_runs / "translation"
    assert "translation" in refused("serve", "--port", 0, run, run)


def test_models_share_the_memory():
    served = models()
    for one in served:
        warm_up(one)
    share_memory(served)
    assert all(0 < one.engine.scheduler.memory < 1 << 50 for one in served)
    assert all(one.engine.scheduler.load.running == 0 for one in served)
