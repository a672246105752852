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
        (["--languages", "en-xx"], "'xx'"),
        (["--languages", "en-de", "--languages", "en-fr"], "--languages"),
        (["--allow-origin", "foo"], "'foo'"),
        (["--allow-origin", "https://example.org/"], "https://example.org/"),
        (["--allow-origin", "https://example.org/page"], "https://example.org/page"),
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
        line = refused("serve", "--port", port)
        assert line.count(f"127.0.0.1:{port}") == 1
        assert "in use" in line
        assert str(("127.0.0.1", port)) not in line


@pytest.mark.usefixtures("bundled")
def test_two_models_with_one_name_are_refused(refused, small_runs):
    run = small_runs / "translation"
    line = refused("serve", "--port", 0, run, run)
    assert "translation" in line
    assert "--served-model-name" in line
    names = ["--served-model-name", "a", "--served-model-name", "a"]
    assert "'a'" in refused("serve", "--port", 0, *names, run, run)


def test_models_share_the_memory():
    served = models()
    for one in served:
        warm_up(one)
    share_memory(served)
    assert all(0 < one.engine.scheduler.memory < 1 << 50 for one in served)
    assert all(one.engine.scheduler.load.running == 0 for one in served)
