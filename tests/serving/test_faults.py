"""The server refuses what it cannot do, in the form of each API, and survives failures."""

import asyncio
import contextlib
import json
import logging
import socket
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import aiohttp
import httpx
import pytest
import torch

from servers import SECONDS, Paced, client, models, serving, until
from texts import sentences
from writehead.config import DecodeConfig
from writehead.engine.runner import Lane
from writehead.errors import ConfigError
from writehead.serving import app
from writehead.serving.logprobs import Scorer
from writehead.serving.models import Models, pair_of, parse_pair
from writehead.serving.settings import Limits, Settings

TEXT = {"text": "the cat"}
PROMPT = {"model": "writer", "prompt": "the cat", "max_tokens": 5}
DEEP = b'{"text": ' + b"[" * 9_000 + b"]" * 9_000 + b"}"
# path, body, status, words of the message
REFUSED = [
    ("/v1/translate", b"{", 400, "valid JSON"),
    ("/v1/translate", b'{"text": "\xff"}', 400, "valid JSON"),
    ("/v1/translate", DEEP, (400, 422), ""),
    ("/v1/translate", b"", 422, ""),
    ("/v1/translate", b"[]", 422, "object"),
    ("/v1/translate", b'{"text":\n "a",, }', 400, "line 2 column 6"),
    ("/v1/translate", b'{"text": "\\ud800"}', 422, "UTF-8"),
    ("/v1/translate", b'{"text": "a", "\\ud800": 1}', 422, ""),
    ("/v1/translate", b'{"text": "a", "model": "\\ud800"}', 404, ""),
    ("/v1/translate", {}, 422, "text"),
    ("/v1/translate", {"text": 5}, 422, "text must be a string or a list"),
    ("/v1/translate", {"text": ["a", None]}, 422, "text[1] must be a string, not null"),
    ("/v1/translate", {"text": [1] * 300_000}, 422, "text"),
    ("/v1/translate", {**TEXT, "bean": 4}, 422, "bean"),
    ("/v1/translate", {**TEXT, "beam": "4"}, 422, "beam"),
    ("/v1/translate", {**TEXT, "beam": True}, 422, "beam"),
    ("/v1/translate", {**TEXT, "beam": 10**30}, 422, "beam"),
    ("/v1/translate", {**TEXT, "beam": 2, "n_best": 3}, 422, "n_best"),
    ("/v1/translate", {**TEXT, "top_k": 3}, 422, "temperature"),
    ("/v1/translate", {**TEXT, "max_length": 41}, 422, "max_length"),
    ("/v1/translate", b'{"text": "a", "alpha": NaN}', 422, "alpha"),
    ("/v1/translate", {**TEXT, "prefix": ["a", "b"]}, 422, "prefix"),
    ("/v1/translate", {**TEXT, "stream": True, "beam": 2}, 422, "beam"),
    ("/v1/translate", {"text": "x" * 100_000}, 422, "100,000"),
    ("/v1/translate", {"text": ["x"] * 2_000}, 422, "2,000"),
    ("/v1/translate", {**TEXT, "model": "toy-en-dd"}, 404, "toy-en-de"),
    ("/v1/translate", {**TEXT, "model": "writer"}, 422, "language model"),
    ("/v1/translate", {**TEXT, "target": "fr"}, 404, "en-de"),
    ("/v1/completions", {**PROMPT, "model": "toy-en-de"}, 422, "/v1/translate"),
    ("/v1/completions", {**PROMPT, "n": 2, "temperature": 0}, 422, "temperature"),
    ("/v1/completions", {**PROMPT, "prompt": "the cat " * 40}, 422, "shorten"),
    ("/v1/completions", {**PROMPT, "max_tokens": 0}, 422, "max_tokens"),
    ("/v1/completions", {**PROMPT, "max_tokens": 0, "echo": True, "stream": True}, 422, "stream"),
    ("/v1/completions", {**PROMPT, "logprobs": 1, "echo": True, "stream": True}, 422, "logprobs"),
    ("/v1/completions", {**PROMPT, "stream": True, "logprobs": 21}, 422, "logprobs"),
    ("/v1/completions", {**PROMPT, "suffix": "b"}, 422, "suffix is not supported"),
    ("/v1/completions", {**PROMPT, "logit_bias": {"5": 1}}, 422, "logit_bias is not supported"),
    ("/v1/completions", {**PROMPT, "best_of": 3}, 422, "best_of is not supported"),
    ("/v1/completions", {**PROMPT, "presence_penalty": 0.5}, 422, "presence_penalty is not"),
    ("/v1/completions", {**PROMPT, "frequency_penalty": 0.5}, 422, "frequency_penalty is not"),
    ("/v1/completions", {**PROMPT, "stop": ["a"] * 20}, 422, "16"),
    ("/v1/completions", {**PROMPT, "stop": ["a", 5]}, 422, "stop[1]"),
    ("/v1/completions", {**PROMPT, "n": 1.5}, 422, "n must be an integer"),
    ("/v1/completions", {**PROMPT, "stream_options": {"a": 4}}, 422, "stream_options.a"),
    ("/v1/nothing", {}, 404, "/v1/nothing"),
    ("/translate", b"{", 400, "column 2"),
    ("/translate", b"[]", 422, "object"),
    ("/translate", {"q": "a", "source": "en"}, 422, "target"),
    ("/translate", {"q": "a", "source": "en", "target": "xx"}, 404, "en-de"),
    ("/translate", {"q": "a", "source": "en", "target": "de", "format": "pdf"}, 422, "format"),
    ("/translate", {"q": "a", "source": "en", "target": "de", "alternatives": 99}, 422, "altern"),
    ("/translate", b'{"q": "\\ud800", "source": "en", "target": "de"}', 422, "UTF-8"),
    ("/v2/translate", b'{"text": ["\\ud800"], "target_lang": "DE"}', 422, "UTF-8"),
    ("/v2/translate", {"text": "a", "target_lang": "DE"}, 422, "text must be a list"),
    ("/v2/languages", {"type": "both"}, 422, "type"),
    ("/v2/translate", {"text": ["a"], "target_lang": "FR"}, 404, "en-de"),
]


def message(path, body):
    """The message of an error, which must have the form of the API of a path."""
    if path.startswith("/v1/"):
        assert set(body) == {"error"}
        assert set(body["error"]) == {"message", "type", "param", "code"}
        return body["error"]["message"]
    key = "message" if path.startswith("/v2/") else "error"
    assert set(body) == {key}
    return body[key]


@pytest.mark.parametrize(("path", "body", "status", "words"), REFUSED)
def test_bad_requests_are_refused(http, path, body, status, words):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = http.post(path, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code in (status if isinstance(status, tuple) else [status])
    assert words in message(path, response.json())
    assert http.post("/v1/translate", json=TEXT).status_code == 200


def test_invalid_forms_and_other_types_are_refused(http):
    for kind, content, status in (
        ("application/x-www-form-urlencoded", b"q=%ff&source=en&target=de", 400),
        ("application/x-www-form-urlencoded", b"&".join([b"q=a"] * 2_000), 400),
        ("application/xml", b"<q/>", 415),
    ):
        response = http.post("/translate", content=content, headers={"Content-Type": kind})
        assert response.status_code == status
        assert message("/translate", response.json())


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/v1/translate", "application/x-www-form-urlencoded"),
        ("/v1/translate", "text/plain"),
        ("/v1/completions", None),
        ("/translate", "application/x-www-form-urlencoded"),
        ("/v2/translate", "text/plain"),
    ],
)
def test_json_without_its_content_type_is_refused(http, path, kind):
    headers = {} if kind is None else {"Content-Type": kind}
    response = http.post(path, content=b' {"text": "x"}', headers=headers)
    assert response.status_code == 415
    assert "application/json" in message(path, response.json())


def test_options_that_change_nothing_are_accepted(http):
    body = {**PROMPT, "suffix": "", "best_of": 1, "logit_bias": {}, "presence_penalty": 0}
    assert http.post("/v1/completions", json=body).status_code == 200
    nothing = dict.fromkeys([*body.keys() - PROMPT.keys(), "frequency_penalty"])
    assert http.post("/v1/completions", json={**PROMPT, **nothing}).status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("path", ["/v1/translate", "/translate"])
def test_large_bodies_are_refused(http, path, chunked):
    content = (b"x" * 100_000 for _ in range(100)) if chunked else b"x" * 10_000_000
    response = http.post(path, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 413
    assert "bytes" in message(path, response.json())


def test_the_method_must_fit(http):
    response = http.get("/v1/translate")
    assert (response.status_code, response.headers["allow"]) == (405, "POST")


def test_models_have_different_names_and_pairs_of_languages(served):
    with pytest.raises(ConfigError, match="toy-en-de"):
        Models([served[0], served[0]])
    with pytest.raises(ConfigError, match="language pair"):
        parse_pair("english")
    names = ["opus-mt-en-de", "en_DE", "de-en", "model", "baden-de"]
    assert [*map(pair_of, names)] == [("en", "de"), ("en", "de"), ("de", "en"), None, None]


def test_keys(served):
    with client_with(served, Settings(keys=("first", "sécond"))) as http:
        assert http.get("/ready").json() == {"ready": True}
        assert http.get("/page.json").json()["needs_key"]
        for key in (None, "no", "firs", "firstt", "Bearer first"):
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            for path, body in (("/v1/translate", TEXT), ("/v1/completions", PROMPT)):
                response = http.post(path, json=body, headers=headers)
                assert (response.status_code, "key" in response.text) == (401, True)
            form = {"q": "a", "source": "en", "target": "de", "api_key": key or ""}
            assert http.post("/translate", data=form).status_code == 401
            headers = {"Authorization": f"DeepL-Auth-Key {key}"}
            body = {"text": ["a"], "target_lang": "DE"}
            assert http.post("/v2/translate", json=body, headers=headers).status_code == 401
        assert http.get("/v1/models").status_code == 401
        key = {"Authorization": "Bearer first"}
        assert http.post("/v1/translate", json=TEXT, headers=key).status_code == 200
        form = {"q": "a", "source": "en", "target": "de", "api_key": "sécond"}
        assert http.post("/translate", data=form).status_code == 200


def test_an_empty_key_is_refused():
    with pytest.raises(ConfigError, match="empty"):
        Settings(keys=("secret", ""))


@contextlib.contextmanager
def client_with(served, settings):
    with serving(served, settings) as url, httpx.Client(base_url=url, timeout=SECONDS) as http:
        yield http


def test_a_full_queue_and_a_late_answer():
    served = models()
    paced = Paced(served[0].engine)
    with client(served, queue=3, deadline=0.5) as http:

        def ask(count):
            return http.post("/v1/translate", json={"text": ["the cat"] * count})

        with ThreadPoolExecutor(2) as pool:
            late = pool.submit(ask, 3)
            until(lambda: waiting(http) == 3)
            refused = ask(1)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert "3" in message("/v1/translate", refused.json())
            assert late.result().status_code == 504
        paced.allow()
        until(lambda: waiting(http) == 0)
        assert ask(3).status_code == 200


def waiting(http):
    return gauge(http, "num_requests_waiting")


def gauge(http, name, model="toy-en-de"):
    """The value of a metric of a model."""
    [line] = [
        line
        for line in http.get("/metrics").text.splitlines()
        if line.startswith(f'writehead_{name}{{model_name="{model}"}}')
    ]
    return float(line.split()[-1])


def test_a_crowd_is_served_or_refused():
    served = models()
    with client(served, queue=20) as http:

        def ask(line):
            return line, http.post("/v1/translate", json={"text": line, "beam": 1})

        with ThreadPoolExecutor(64) as pool:
            answers = [*pool.map(ask, sentences(50, seed=1))]
        assert {answer.status_code for _, answer in answers} <= {200, 429}
        for line, answer in answers:
            if answer.status_code == 200:
                [output] = served[0].engine.translate([line], DecodeConfig(beam=1))
                assert answer.json()["translations"][0]["text"] == output.text
        assert http.get("/health").json() == {"status": "ok"}


def test_ten_thousand_requests_are_queued_or_refused():
    served, count, queue = models(), 10_000, 1024
    paced, statuses = Paced(served[0].engine), Counter()
    with serving(served, Settings(limits=Limits(queue=queue, deadline=300.0))) as url:

        async def ask(session):
            async with session.post(f"{url}/v1/translate", json=TEXT) as response:
                answer = await response.json()
                statuses[response.status] += 1
                if response.status == 429:
                    assert int(response.headers["retry-after"]) >= 1
                    assert f"{queue:,}" in answer["error"]["message"]
                else:
                    return answer["translations"][0]["text"]
                if statuses[429] == count - queue:
                    paced.allow()
                return None

        async def crowd():
            connector = aiohttp.TCPConnector(limit=queue + 200)
            async with aiohttp.ClientSession(connector=connector) as session:
                return await asyncio.gather(*(ask(session) for _ in range(count)))

        answers = {*asyncio.run(crowd())} - {None}
        assert statuses == {200: queue, 429: count - queue}
        [output] = models()[0].engine.translate([TEXT["text"]])
        assert answers == {output.text}


@pytest.mark.parametrize("options", [{}, {"stream": True}, {"stop": "never this"}])
def test_a_client_that_goes_away_frees_its_slot(options):
    served, stream = models(), "stream" in options
    path, body = "/v1/translate", {"text": "the cat", "beam": 1, "min_length": 40}
    if "stop" in options:  # the server reads a stream, but the client does not
        path, body = "/v1/completions", {**PROMPT, "max_tokens": 30, "min_tokens": 30}
    name = body.get("model", "toy-en-de")
    paced = Paced(served["model" in body].engine)
    with client(served) as http:
        body = json.dumps({**body, **options})
        head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n"
        head += "Content-Type: application/json\r\n\r\n"
        address = (http.base_url.host, http.base_url.port)
        with socket.create_connection(address) as connection:
            connection.sendall((head + body).encode())
            until(lambda: gauge(http, "num_requests_waiting", name) == 1)
            paced.allow(3)
            until(lambda: gauge(http, "num_requests_running", name) == 1)
            if stream:
                assert b" 200 " in connection.recv(1 << 16)  # the events may come later
        until(lambda: 'finished_reason="abort"' in http.get("/metrics").text)
        # the worker is about to run a step; it learns of the cancellation after that
        paced.allow(2)
        until(lambda: gauge(http, "num_requests_running", name) == 0)
        assert paced.steps <= 5


@pytest.mark.parametrize("path", ["/v1/translate", "/translate"])
@pytest.mark.parametrize("kind", ["application/json", "application/x-www-form-urlencoded"])
def test_a_client_that_goes_away_while_it_sends_is_no_failure(served, caplog, path, kind):
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\nContent-Type: {kind}\r\n"
    with caplog.at_level(logging.INFO), client(served) as http:
        address = (http.base_url.host, http.base_url.port)
        with socket.create_connection(address) as connection:
            connection.sendall(f"{head}\r\nq=a".encode())
        until(lambda: 'responses_total{status="499"} 1.0' in http.get("/metrics").text)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_slow_reader_holds_no_slot(served):
    with client(served) as http:
        body = json.dumps({"text": ["the cat"] * 500, "beam": 1, "stream": True})
        head = f"POST /v1/translate HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n"
        head += "Content-Type: application/json\r\n\r\n"
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect((http.base_url.host, http.base_url.port))
            connection.sendall((head + body).encode())
            assert connection.recv(10)
            until(lambda: gauge(http, "num_requests_running") + waiting(http) == 0)
            received = b""
            while not received.endswith(b"0\r\n\r\n"):
                received += connection.recv(1 << 16)
            assert b"data: [DONE]" in received


def test_slow_clients_are_dropped(served, monkeypatch):
    monkeypatch.setattr(app, "SLOW_SECONDS", 0.0)
    head = "POST /v1/translate HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{"
    with client(served, deadline=0.2) as http:
        address = (http.base_url.host, http.base_url.port)
        with socket.create_connection(address, timeout=SECONDS) as connection:
            connection.sendall(head.encode())
            assert b" 408 " in connection.recv(1 << 16)


def test_a_step_that_raises_fails_its_requests_only(monkeypatch, caplog):
    served = models()
    step, lines = Lane.step, sentences(12, seed=2)

    def broken(lane, slots, steps):
        if lane.shape.beam == 2:
            raise RuntimeError("a fault of the device")
        step(lane, slots, steps)

    monkeypatch.setattr(Lane, "step", broken)
    with client(served) as http, ThreadPoolExecutor(12) as pool:

        def ask(job):
            i, line = job
            return http.post("/v1/translate", json={"text": line, "beam": 1 + i % 2})

        answers = [*pool.map(ask, enumerate(lines))]
        for i, answer in enumerate(answers):
            if i % 2:
                assert answer.status_code == 500
                name = answer.headers["x-request-id"]
                assert name in message("/v1/translate", answer.json())
                assert name in caplog.text
                assert "device" not in answer.text
            else:
                [output] = served[0].engine.translate([lines[i]], DecodeConfig(beam=1))
                assert answer.json()["translations"][0]["text"] == output.text
        assert "a fault of the device" in caplog.text
        monkeypatch.setattr(Lane, "step", step)
        assert ask((1, lines[1])).status_code == 200


@pytest.mark.parametrize(
    ("error", "status"), [(RuntimeError("a fault"), 500), (torch.OutOfMemoryError("full"), 503)]
)
def test_log_probabilities_that_fail_end_their_stream_only(monkeypatch, caplog, error, status):
    served = models()
    with client(served) as http:
        scored = {**PROMPT, "temperature": 0, "stream": True, "logprobs": 1}
        with monkeypatch.context() as patched:
            patched.setattr(Scorer, "__call__", lambda *_: raise_(error))
            refused = http.post("/v1/completions", json=scored)
            assert refused.status_code == status
            assert refused.headers["x-request-id"] in caplog.text
            plain = http.post("/v1/completions", json={**scored, "logprobs": None})
            assert plain.text.endswith("[DONE]\n\n")
        assert http.post("/v1/completions", json=scored).text.endswith("[DONE]\n\n")


def test_one_of_several_streams_with_log_probabilities_fails(monkeypatch):
    score = Scorer.__call__

    def sometimes(scorer, new):
        if scorer._top == 3:
            raise RuntimeError("a fault")
        return score(scorer, new)

    monkeypatch.setattr(Scorer, "__call__", sometimes)
    with client(models()) as http, ThreadPoolExecutor(8) as pool:

        def ask(top):
            body = {**PROMPT, "temperature": 0, "stream": True, "logprobs": top, "n": 1}
            return http.post("/v1/completions", json=body)

        tops = [1, 3, 2, 3, 1, 3, 0, 2]
        for top, answer in zip(tops, pool.map(ask, tops), strict=True):
            assert answer.status_code == (500 if top == 3 else 200)
            assert answer.text.endswith("[DONE]\n\n") == (top != 3)
        assert http.get("/health").status_code == 200


def test_streams_with_log_probabilities_have_a_limit(monkeypatch):
    monkeypatch.setattr("writehead.serving.service.SCORED_POSITIONS", 40)
    with client(models()) as http:
        body = {**PROMPT, "stream": True, "logprobs": 0, "max_tokens": 12, "seed": 1}
        for _ in range(3):  # finished streams do not count
            assert http.post("/v1/completions", json=body).status_code == 200
        refused = http.post("/v1/completions", json={**body, "n": 8})
        assert refused.status_code == 422
        assert "positions" in message("/v1/completions", refused.json())
        for other in ({"logprobs": None}, {"stream": False}):
            assert http.post("/v1/completions", json={**body, "n": 8} | other).status_code == 200


def test_a_lack_of_memory_makes_batches_smaller(monkeypatch):
    served = models()
    step, lines = Lane.step, sentences(24, seed=3, longest=12)

    def limited(lane, slots, steps):
        if lane.shape.slots * lane.shape.beam > 8:
            raise torch.OutOfMemoryError("out of memory")
        step(lane, slots, steps)

    monkeypatch.setattr(Lane, "step", limited)
    with client(served) as http:
        answer = http.post("/v1/translate", json={"text": lines}).json()
        outputs = served[0].engine.translate(lines)
        found = [one["text"] for one in answer["translations"]]
        assert found == [output.text for output in outputs]
        prompt = {**PROMPT, "temperature": 0, "stream": True}
        assert http.post("/v1/completions", json=prompt).text.endswith("[DONE]\n\n")
        monkeypatch.setattr(Lane, "step", lambda *_: raise_(torch.OutOfMemoryError("no memory")))
        refused = http.post("/v1/translate", json={"text": lines[0]})
        assert refused.status_code == 503
        assert "memory" in message("/v1/translate", refused.json())
        assert http.get("/health").status_code == 200


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), RuntimeError("a fault")])
def test_requests_that_can_never_start_are_not_repeated_forever(monkeypatch, error):
    with client(models()) as http:
        with monkeypatch.context() as patched:
            patched.setattr(Lane, "__init__", lambda *_, **__: raise_(error))
            refused = http.post("/v1/translate", json={"text": sentences(5)})
        assert refused.status_code == (500 if type(error) is RuntimeError else 503)
        assert http.post("/v1/translate", json=TEXT).status_code == 200


def raise_(error):
    raise error


def test_a_fault_of_the_server_has_an_id(served, monkeypatch):
    with client(served) as http:
        monkeypatch.setattr(Models, "translator", lambda *_, **__: raise_(KeyError("secret")))
        response = http.post("/v1/translate", json=TEXT)
        assert response.status_code == 500
        assert response.headers["x-request-id"] in message("/v1/translate", response.json())
        assert "secret" not in response.text
        assert http.get("/health").status_code == 200


def test_one_line_per_request_without_its_text(served, caplog):
    with caplog.at_level(logging.INFO, "writehead.serving.requests"):
        with client(served) as http:
            http.post("/v1/translate", json={"text": "the cat"})
            http.post("/v1/translate", json={"text": "the cat", "beam": 99})
            http.get("/metrics")
        with client_with(served, Settings(log_text=True)) as http:
            http.post("/v1/translate", json={"text": "the cat"})
    lines = [
        json.loads(record.getMessage())
        for record in caplog.records
        if record.name == "writehead.serving.requests"
    ]
    assert [line["status"] for line in lines] == [200, 422, 200]
    first, second, third = lines
    assert first["model"] == "toy-en-de"
    assert first["tokens"] > 0
    assert "cat" not in json.dumps([first, second])
    assert third["texts"] == ["the cat"]
    assert len({line["id"] for line in lines}) == 3


def test_other_origins_only_if_allowed(served):
    headers = {"Origin": "https://example.org"}
    for origins in ((), ("https://example.org",)):
        with client_with(served, Settings(origins=origins)) as http:
            response = http.post("/v1/translate", json=TEXT, headers=headers)
            allowed = response.headers.get("access-control-allow-origin")
            assert allowed == (origins[0] if origins else None)


def test_metrics_count(served):
    with client(served) as http:
        body = {"text": ["the cat", "a dog runs"], "beam": 1}
        usage = http.post("/v1/translate", json=body).json()["usage"]
        *_, last, _, _ = http.post("/v1/translate", json={**body, "stream": True}).text.split(
            "\n\n"
        )
        assert json.loads(last.removeprefix("data: "))["usage"] == usage
        text = http.get("/metrics").text
        ended = 'writehead_request_success_total{finished_reason="%s",model_name="toy-en-de"}'
        counts = [line for line in text.splitlines() if line.startswith(ended[:40])]
        assert sum(float(line.split()[-1]) for line in counts) == 2
        assert gauge(http, "time_to_first_token_seconds_count") == 2
        assert gauge(http, "e2e_request_latency_seconds_count") == 2
        assert gauge(http, "request_queue_time_seconds_count") == 2
        assert gauge(http, "kv_cache_usage_perc") == 0
        assert gauge(http, "prompt_tokens_total") == 2 * usage["prompt_tokens"]
