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
def start(small_runs):
    """Starts servers; they are killed at the end."""
    command = [sys.executable, "-m", "writehead", "serve", "--threads", "1"]
    command += ["--served-model-name", "toy-en-de", str(small_runs / "translation")]
    processes = []

    def begin(*options):
        command_line = [*command, *map(str, options or ("--port", 0))]
        processes.append(
            subprocess.Popen(
                command_line,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment(),
            )
        )
        return processes[-1]

    yield begin
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def starting(start):
    """Four servers that start at the same time; the third has no time to finish requests."""
    return [start(), start(), start("--port", 0, "--grace", 0), start()]


def url_of(process):
    line = process.stderr.readline()
    return re.search(r"http://\S+", line)[0]


RUNNING = re.compile(r"^writehead_num_requests_running\S* [1-9]", re.MULTILINE)


def answer_after_sigterm(process, url, lines):
    """The answer to a request that is running when the server gets SIGTERM."""
    answers = []

    def ask():
        body = {"text": lines}
        answers.append(httpx.post(f"{url}/v1/translate", json=body, timeout=SECONDS))

    thread = threading.Thread(target=ask)
    thread.start()
    until(lambda: RUNNING.search(httpx.get(f"{url}/metrics").text))
    process.send_signal(signal.SIGTERM)
    thread.join(SECONDS)
    [answer] = answers
    return answer


def test_sigterm_lets_requests_finish(starting, small_runs):
    process, lines = starting[0], sentences(600, longest=5)
    url = url_of(process)
    answer = answer_after_sigterm(process, url, lines)
    assert answer.status_code == 200
    found = [one["text"] for one in answer.json()["translations"]]
    outputs = Engine.load(small_runs / "translation").translate(lines, DecodeConfig())
    assert found == [output.text for output in outputs]
    out, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, err) == (0, "")
    assert json.loads(out.splitlines()[-1])["status"] == 200
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/ready")


def test_requests_are_refused_when_the_time_to_finish_is_over(starting):
    process = starting[2]
    answer = answer_after_sigterm(process, url_of(process), sentences(1000))
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert "shutting down" in answer.json()["error"]["message"]
    process.communicate(timeout=SECONDS)
    assert process.returncode == 0


def test_a_second_ctrl_c_stops_at_once(starting):
    process = starting[3]
    url, failures = url_of(process), []

    def ask():
        with pytest.raises(httpx.TransportError):
            httpx.post(f"{url}/v1/translate", json={"text": sentences(1000)}, timeout=SECONDS)
        failures.append(True)

    thread = threading.Thread(target=ask)
    thread.start()
    until(lambda: RUNNING.search(httpx.get(f"{url}/metrics").text))
    process.send_signal(signal.SIGINT)
    until(lambda: is_closed(url))
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, err) == (-signal.SIGINT, "")
    thread.join(SECONDS)
    assert failures


def is_closed(url):
    try:
        httpx.get(f"{url}/ready")
    except httpx.TransportError:
        return True
    return False


def test_sigkill_ends_connections_and_a_new_server_takes_the_port(start, starting, small_runs):
    process = starting[1]
    url, lines = url_of(process), sentences(600, longest=5)  # with the others, fewer than wait
    failures = []

    def ask():
        with pytest.raises(httpx.TransportError):
            while True:
                httpx.post(f"{url}/v1/translate", json={"text": lines[:40]}, timeout=SECONDS)
        failures.append(True)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    stream = httpx.stream("POST", f"{url}/v1/translate", json={"text": lines, "stream": True})
    with stream as response, pytest.raises(httpx.RemoteProtocolError):
        assert response.status_code == 200
        for _ in response.iter_lines():
            process.kill()
    assert process.wait() == -signal.SIGKILL
    for thread in threads:
        thread.join(SECONDS)
    assert len(failures) == 4
    assert url_of(start("--port", url.rpartition(":")[2])) == url
    answer = httpx.post(f"{url}/v1/translate", json={"text": lines[:9]}, timeout=SECONDS)
    outputs = Engine.load(small_runs / "translation").translate(lines[:9], DecodeConfig())
    assert [one["text"] for one in answer.json()["translations"]] == [one.text for one in outputs]
