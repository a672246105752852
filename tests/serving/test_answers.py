"""Answers of the server equal what the engine decodes offline."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from texts import ODD, sentences, tokenizer
from writehead.config import DecodeConfig
from writehead.serving.logprobs import Listing, Scored

LINES = sentences(9, seed=4, longest=12)
LONG = " ".join(sentences(12, seed=5))  # in several pieces


def approximately(found, output):
    """Whether a translation of the server is an output of the engine."""
    assert [one["text"] for one in found["hypotheses"]] == [one.text for one in output.hypotheses]
    for ours, one in zip(found["hypotheses"], output.hypotheses, strict=True):
        assert ours["score"] == pytest.approx(one.score, rel=1e-9)
        assert ours["log_probability"] == pytest.approx(one.log_probability, rel=1e-9)
        assert ours["finished"] == one.finished
    assert (found["text"], found["pieces"]) == (output.text, output.pieces)
    return True


def events(response):
    """The events of a stream, without the last, which is [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream")
    *some, last = [one.removeprefix("data: ") for one in response.text.split("\n\n") if one]
    assert last == "[DONE]"
    return [json.loads(one) for one in some]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"beam": 3, "n_best": 3, "alpha": 1.1},
        {"beam": 1, "max_length": 5},
        {"temperature": 0.8, "top_k": 7, "seed": 11},
        {"repetition_penalty": 1.7, "min_length": 3},
    ],
)
def test_every_option_of_the_engine(http, served, options):
    texts = [*LINES, *ODD, LONG]
    answer = http.post("/v1/translate", json={"text": texts, **options}).json()
    outputs = [*served[0].engine.translate(texts, DecodeConfig(**options))]
    assert len(answer["translations"]) == len(outputs)
    assert all(map(approximately, answer["translations"], outputs))
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_a_prefix_starts_each_translation(http, served):
    body = {"text": LINES[:2], "prefix": ["the cat", "a bird"], "model": "toy-en-de"}
    found = http.post("/v1/translate", json=body).json()["translations"]
    outputs = [*served[0].engine.translate(LINES[:2], prefixes=body["prefix"])]
    assert all(map(approximately, found, outputs))
    assert found[1]["text"].startswith("a bird")


def test_a_stream_of_a_translation_is_its_text(http, served):
    texts = [*LINES[:3], LONG, "", LONG]
    *pieces, last = events(http.post("/v1/translate", json={"text": texts, "stream": True}))
    outputs = [*served[0].engine.translate(texts, DecodeConfig(beam=1))]
    assert all(map(approximately, last["translations"], outputs))
    for i, output in enumerate(outputs):
        assert "".join(one["text"] for one in pieces if one["index"] == i) == output.text


def test_libretranslate_keeps_lines_and_markup(http, served):
    body = {"source": "en", "target": "de", "q": f"  {LINES[0]}\n\n{LINES[1]}\r\n...\n"}
    first, second = [one.text for one in served[0].engine.translate(LINES[:2])]
    assert http.post("/translate", json=body).json() == {
        "translatedText": f"  {first}\n\n{second}\r\n...\n"
    }
    body |= {"format": "html", "q": f"<p id='a'>{LINES[0]}</p><!-- x --><script>a<b</script>"}
    body["q"] += f"<b>&lt;</b><br/>&amp;{LINES[1]}"
    [other] = served[0].engine.translate([f"&{LINES[1]}"])
    assert http.post("/translate", json=body).json()["translatedText"] == (
        f"<p id='a'>{first}</p><!-- x --><script>a<b</script><b>&lt;</b><br/>"
        + other.text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    )


def test_libretranslate_lists_and_alternatives(http, served):
    body = {"q": LINES[:3], "source": "auto", "target": "de", "alternatives": 2}
    answer = http.post("/translate", json=body).json()
    options = DecodeConfig(beam=4, n_best=3)
    for i, output in enumerate(served[0].engine.translate(LINES[:3], options)):
        best, *others = [one.text for one in output.hypotheses]
        assert (answer["translatedText"][i], answer["alternatives"][i]) == (best, others)
    assert http.get("/languages").json() == [
        {"code": "de", "name": "German", "targets": []},
        {"code": "en", "name": "English", "targets": ["de"]},
    ]


@pytest.mark.parametrize("form", [False, True])
def test_deepl(http, served, form):
    body = {"text": LINES[:2], "source_lang": "EN", "target_lang": "DE-DE"}
    answer = http.post("/v2/translate", **({"data": body} if form else {"json": body})).json()
    outputs = served[0].engine.translate(LINES[:2])
    assert [one["text"] for one in answer["translations"]] == [one.text for one in outputs]


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 0.9, "top_p": 0.8}])
def test_completions(http, served, options):
    body = {"model": "writer", "prompt": LINES[:2], "max_tokens": 9, "seed": 5, **options}
    body |= {} if options["temperature"] == 0 else {"n": 3}
    answer = http.post("/v1/completions", json=body).json()
    known = {"temperature": options["temperature"] or None, "top_p": options.get("top_p")}
    config = DecodeConfig(max_length=9, seed=5, **known)
    outputs = served[1].engine.generate(LINES[:2], config, samples=body.get("n", 1))
    expected = [one for output in outputs for one in output.hypotheses]
    assert [one["text"] for one in answer["choices"]] == [one.text for one in expected]
    for choice, one in zip(answer["choices"], expected, strict=True):
        assert choice["finish_reason"] == ("stop" if one.finished else "length")
    *chunks, last = events(
        http.post(
            "/v1/completions",
            json={**body, "stream": True, "stream_options": {"include_usage": True}},
        )
    )
    for i, one in enumerate(expected):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == i]
        assert "".join(choice["text"] for choice in own) == one.text
        assert [choice["finish_reason"] for choice in own][-1] is not None
    prompt_tokens = sum(len(served[1].engine.tokenizer.encode(line)) for line in LINES[:2])
    assert last["usage"]["prompt_tokens"] == answer["usage"]["prompt_tokens"] == prompt_tokens


def test_log_probabilities_of_tokens_add_up(http, served):
    body = {"model": "writer", "prompt": "the cat", "max_tokens": 6, "temperature": 0}
    [choice] = http.post("/v1/completions", json={**body, "logprobs": 2}).json()["choices"]
    [output] = served[1].engine.generate(["the cat"], DecodeConfig(max_length=6))
    [best], scored = output.hypotheses, choice["logprobs"]
    if not best.finished:  # else, the end token has a probability, too
        assert sum(scored["token_logprobs"]) == pytest.approx(best.log_probability, rel=1e-5)
    assert "".join(scored["tokens"]) == best.text
    assert scored["text_offset"][0] == 0
    for p, tops in zip(scored["token_logprobs"], scored["top_logprobs"], strict=True):
        assert len(tops) <= 2
        assert max(tops.values()) == pytest.approx(p)  # greedy search takes the likeliest


@pytest.mark.parametrize("most", [0, 7])
def test_an_echo_has_the_log_probabilities_of_the_prompt(http, served, most):
    engine = served[1].engine
    body = {"model": "writer", "prompt": ["a dog runs.", "", "the cat"], "max_tokens": most}
    body |= {"seed": 2, "echo": True, "logprobs": 3, "n": 2}
    answer = http.post("/v1/completions", json=body).json()
    assert (answer["usage"]["completion_tokens"] == 0) == (most == 0)
    assert len(answer["choices"]) == 6
    for i, choice in enumerate(answer["choices"]):
        prompt, scored = body["prompt"][i // 2], choice["logprobs"]
        assert choice["text"].startswith(prompt)
        assert "".join(scored["tokens"]) == choice["text"]
        starts = [len("".join(scored["tokens"][:j])) for j in range(len(scored["tokens"]))]
        assert scored["text_offset"] == starts
        known = [engine.model.config.bos, *engine.tokenizer.encode(prompt)]
        first, *rest = scored["token_logprobs"][: len(known)]
        assert first is scored["top_logprobs"][0] is None
        with torch.no_grad():
            log_p = engine.model(torch.tensor([known]))[0].log_softmax(dim=1)
        assert rest == pytest.approx(
            [float(log_p[j, k]) for j, k in enumerate(known[1:])], rel=1e-5
        )
        if most == 0:
            assert (choice["text"], choice["finish_reason"]) == (prompt, "length")
            assert len(scored["tokens"]) == len(known)
        plain = http.post("/v1/completions", json={**body, "echo": False, "max_tokens": 7}).json()
        own = plain["choices"][i]["logprobs"]
        if most:
            assert scored["tokens"][len(known) :] == own["tokens"]
            assert scored["token_logprobs"][len(known) :] == pytest.approx(
                own["token_logprobs"], rel=1e-5
            )


def test_an_echo_alone_decodes_nothing(http, served):
    body = {"model": "writer", "prompt": LINES[:2], "max_tokens": 0, "echo": True, "n": 1}
    steps = served[1].engine.scheduler.stats.steps
    answer = http.post("/v1/completions", json=body).json()
    assert [one["text"] for one in answer["choices"]] == LINES[:2]
    assert {one["logprobs"] for one in answer["choices"]} == {None}
    assert served[1].engine.scheduler.stats.steps == steps


@pytest.mark.parametrize("stream", [False, True])
def test_top_tokens_are_spelled_as_the_tokens_and_have_the_chosen_one(http, served, stream):
    body = {"model": "writer", "prompt": LINES[:3], "max_tokens": 15, "seed": 4, "logprobs": 20}
    response = http.post("/v1/completions", json={**body, "stream": stream})
    answers = events(response) if stream else [response.json()]
    lists = [choice["logprobs"] for one in answers for choice in one["choices"]]
    spaces = 0
    for one in lists:
        for text, log_p, top in zip(
            one["tokens"], one["token_logprobs"], one["top_logprobs"], strict=True
        ):
            assert top[text] >= log_p
            assert [*top.values()] == sorted(top.values(), reverse=True)
            spaces += sum(key.startswith(" ") for key in top)
    assert spaces


def test_other_tokens_have_the_text_that_they_would_add():
    ours = tokenizer()
    before = ours.encode("the cat 🙂")[:-1]  # without the last byte
    last = ours.encode("the cat 🙂")[-1]
    words = [ours.encode(text)[0] for text in ("the", "a")]
    listing = Listing(ours, before, 0, 5)
    listing.add("", words[0], Scored(-3.0, [(last, -0.5), (words[1], -1.0), (before[-1], -2.0)]))
    [top] = listing.take()["top_logprobs"]
    whole = ours.decode([*before, last])
    assert whole.endswith("🙂")
    assert top["🙂"] == -0.5
    listing = Listing(ours, ours.encode("the cat"), 0, 5)
    listing.add(" the", words[0], Scored(-3.0, [(words[1], -1.0)]))
    assert listing.take()["top_logprobs"] == [{" a": -1.0, " the": -3.0}]


def test_of_two_tokens_with_one_text_the_likelier_remains():
    ours = tokenizer()
    [a] = ours.encode("a")
    for scored, expected in (
        (Scored(-3.0, [(a, -1.0)]), -1.0),
        (Scored(-0.1, [(a, -1.0)]), -0.1),
        (Scored(-2.0, [(a, -0.5), (a, -1.0)]), -0.5),
    ):
        listing = Listing(ours, ours.encode("the"), 0, 5)
        listing.add(" a", a, scored)
        assert listing.take()["top_logprobs"] == [{" a": expected}]


def test_a_completion_without_tokens_has_no_log_probabilities(http):
    body = {"model": "writer", "prompt": "", "logprobs": 1, "stop": "", "temperature": 0}
    for prompt in ("", *LINES):  # some end at once
        [choice] = http.post("/v1/completions", json={**body, "prompt": prompt}).json()["choices"]
        scored = choice["logprobs"]
        assert "".join(scored["tokens"]) == choice["text"]  # also of incomplete characters
        assert len(scored["tokens"]) == len(scored["token_logprobs"]) == len(scored["top_logprobs"])


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text(http, served, stream):
    [output] = served[1].engine.generate(["the cat"], DecodeConfig(max_length=30))
    stop = output.text[len(output.text) // 2 :][:3]
    body = {"model": "writer", "prompt": "the cat", "max_tokens": 30, "temperature": 0}
    body |= {"stop": [stop, "never this"], "stream": stream}
    response = http.post("/v1/completions", json=body)
    choices = [one["choices"][0] for one in (events(response) if stream else [response.json()])]
    assert "".join(one["text"] for one in choices) == output.text[: output.text.index(stop)]
    assert choices[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0, "logprobs": 0},
        {"n": 3, "seed": 5, "logprobs": 2},
        {"n": 2, "seed": 8, "logprobs": 3, "stop": ["e", "o d"], "min_tokens": 4},
    ],
)
def test_streamed_log_probabilities_are_those_of_the_whole(http, options):
    body = {"model": "writer", "prompt": [*LINES[:3], ""], "max_tokens": 20, **options}
    choices = http.post("/v1/completions", json=body).json()["choices"]
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events(http.post("/v1/completions", json=body))
    assert last["usage"]["total_tokens"] > 0
    assert {chunk["usage"] for chunk in chunks} == {None}
    for i, choice in enumerate(choices):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == i]
        assert "".join(one["text"] for one in own) == choice["text"]
        assert own[-1]["finish_reason"] == choice["finish_reason"]
        parts = [one["logprobs"] for one in own if one["logprobs"]]
        scored = choice["logprobs"]
        for name in ("tokens", "text_offset"):
            assert [one for part in parts for one in part[name]] == scored[name]
        log_p = [p for part in parts for p in part["token_logprobs"]]
        assert log_p == pytest.approx(scored["token_logprobs"], rel=1e-5)
        if options["logprobs"]:
            tops = [top for part in parts for top in part["top_logprobs"]]
            for top, expected in zip(tops, scored["top_logprobs"], strict=True):
                assert top == pytest.approx(expected, rel=1e-5)
        else:
            assert {part["top_logprobs"] for part in parts} == {None}


def test_many_clients_at_once(http, served):
    lines = sentences(40, seed=9, longest=12)
    searches = [{"beam": 1}, {"beam": 2}, {"beam": 4}, {"temperature": 1.0, "seed": 3}]
    jobs = [(line, searches[i % 4]) for i, line in enumerate(lines)]

    def ask(job):
        return http.post("/v1/translate", json={"text": job[0], **job[1]}).json()

    with ThreadPoolExecutor(16) as pool:
        answers = [*pool.map(ask, jobs)]
    for (line, search), answer in zip(jobs, answers, strict=True):
        [output] = served[0].engine.translate([line], DecodeConfig(**search))
        assert approximately(answer["translations"][0], output)
