"""`writehead serve` finishes its requests on SIGTERM, and may be killed at any time."""

import json
import re
import signal
import subprocess
import sys
import threading

import httpx
import pytest

from processes import environment
from servers import SECONDS, until
from texts import sentences
from writehead.config import DecodeConfig
from writehead.engine import Engine


@pytest.fixture(scope="module")
def starting(small_runs):
    """Two servers that start at the same time."""
    command = [sys.executable, "-m", "writehead", "serve", "--port", "0", "--threads", "1"]
    command += ["--served-model-name", "toy-en-de", str(small_runs / "translation")]
    processes = [
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
        )
        for _ in range(2)
    ]
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def url_of(process):
    line = process.stderr.readline()
    return re.search(r"http://\S+", line)[0]


def test_sigterm_lets_requests_finish(starting, small_runs):
    process, lines = starting[0], sentences(600, longest=5)
    url, answers = url_of(process), []

    def ask():
        body = {"text": lines}
        answers.append(httpx.post(f"{url}/v1/translate", json=body, timeout=SECONDS))

    thread = threading.Thread(target=ask)
    thread.start()
    running = re.compile(r"^writehead_num_requests_running\S* [1-9]", re.MULTILINE)
    until(lambda: running.search(httpx.get(f"{url}/metrics").text))
    process.send_signal(signal.SIGTERM)
    thread.join(SECONDS)
    [answer] = answers
    assert answer.status_code == 200
    found = [one["text"] for one in answer.json()["translations"]]
    outputs = Engine.load(small_runs / "translation").translate(lines, DecodeConfig())
    assert found == [output.text for output in outputs]
    out, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, err) == (0, "")
    assert json.loads(out.splitlines()[-1])["status"] == 200
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/ready")


def test_sigkill_ends_connections(starting):
    process = starting[1]
    url = url_of(process)
    body = {"text": sentences(900, longest=5), "stream": True}
    stream = httpx.stream("POST", f"{url}/v1/translate", json=body, timeout=SECONDS)
    with stream as response, pytest.raises(httpx.RemoteProtocolError):
        assert response.status_code == 200
        for _ in response.iter_lines():
            process.kill()
    assert process.wait() == -signal.SIGKILL
