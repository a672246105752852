"""Clients of other APIs work unchanged, and Schemathesis finds nothing."""

import html

import deepl
import libretranslatepy
import openai
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.specs.openapi.checks import positive_data_acceptance

from servers import client, models, serving
from writehead.config import DecodeConfig
from writehead.data.outputs import Output, ScoredText
from writehead.serving.documents import join_parts, parts_of
from writehead.serving.models import Served
from writehead.serving.settings import Settings
from writehead.serving.stop import StopText


@pytest.fixture(scope="module")
def ai(http):
    return openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0)


def test_openai_completes_and_streams(ai, served):
    [output] = served[1].engine.generate(["a dog"], DecodeConfig(max_length=12, min_length=9))
    options = {"model": "writer", "prompt": "a dog", "max_tokens": 12, "temperature": 0}
    options["extra_body"] = {"min_tokens": 9}
    whole = ai.completions.create(**options, logprobs=1)
    assert whole.choices[0].text == output.text
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    assert len(whole.choices[0].logprobs.tokens) == len(whole.choices[0].logprobs.token_logprobs)
    chunks = [*ai.completions.create(**options, stream=True)]
    assert "".join(chunk.choices[0].text for chunk in chunks) == output.text
    assert len(chunks) > 2
    seeded = {**options, "temperature": 1.0, "n": 2, "seed": 7}
    texts = [[choice.text for choice in ai.completions.create(**seeded).choices] for _ in range(2)]
    assert texts[0] == texts[1]


def test_openai_streams_log_probabilities_of_several_choices(ai):
    options = {"model": "writer", "prompt": ["a dog", "the cat"], "max_tokens": 15, "n": 2}
    options |= {"seed": 3, "logprobs": 2, "stop": ["q", "a "]}
    whole = ai.completions.create(**options)
    chunks = [
        *ai.completions.create(**options, stream=True, stream_options={"include_usage": True})
    ]
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    found = {choice.index: ("", [], []) for choice in whole.choices}
    for chunk in chunks[:-1]:
        [choice] = chunk.choices
        text, tokens, log_p = found[choice.index]
        tokens += choice.logprobs.tokens
        log_p += choice.logprobs.token_logprobs
        # the chosen token and the likeliest
        assert all(1 <= len(top) <= 3 for top in choice.logprobs.top_logprobs)
        found[choice.index] = text + choice.text, tokens, log_p
    assert len(found) == 4
    for choice in whole.choices:
        text, tokens, log_p = found[choice.index]
        assert (text, tokens) == (choice.text, choice.logprobs.tokens)
        assert log_p == pytest.approx(choice.logprobs.token_logprobs, rel=1e-5)


def test_openai_lists_models_and_raises_its_own_errors(ai):
    assert [one.id for one in ai.models.list()] == ["toy-en-de", "writer"]
    assert ai.models.retrieve("writer").owned_by == "writehead"
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        ai.completions.create(model="nobody", prompt="a")
    with pytest.raises(openai.UnprocessableEntityError, match="max_tokens"):
        ai.completions.create(model="writer", prompt="a", max_tokens=0)


def test_libretranslate(http, served):
    theirs = libretranslatepy.LibreTranslateAPI(str(http.base_url))
    [output] = served[0].engine.translate(["the cat sees a dog."])
    assert theirs.translate("the cat sees a dog.", "en", "de") == output.text
    assert [one["code"] for one in theirs.languages()] == ["de", "en"]


def test_deepl(served):
    lines = ["the cat sees a dog.", "a bird  🙂\n\nruns."]
    with client(served) as http:
        theirs = deepl.DeepLClient("key", server_url=str(http.base_url), send_platform_info=False)
        answers = theirs.translate_text(lines, source_lang="EN", target_lang="DE")
        [output] = served[0].engine.translate(lines[:1])
        assert answers[0].text == output.text
        assert answers[1].text.count("\n") == 2
        assert {one.detected_source_lang for one in answers} == {"EN"}
        assert [one.billed_characters for one in answers] == [*map(len, lines)]
        usage = theirs.get_usage()
        assert usage.character.count == sum(map(len, lines))
        assert not usage.any_limit_reached
        assert [(one.code, one.name) for one in theirs.get_source_languages()] == [
            ("EN", "English")
        ]
        assert [one.code for one in theirs.get_target_languages()] == ["DE"]
        for method in ("GET", "POST"):
            [found] = http.request(method, "/v2/languages", params={"type": "target"}).json()
            assert found == {"language": "DE", "name": "German", "supports_formality": False}
            assert http.request(method, "/v2/usage").status_code == 200
        with pytest.raises(deepl.DeepLException, match="en-de"):
            theirs.translate_text("a", target_lang="FR")


def test_deepl_accepts_the_targets_that_it_lists(served):
    pair = Served("de-en", served[0].engine, ("de", "en"))
    with client([pair]) as http:
        theirs = deepl.DeepLClient("key", server_url=str(http.base_url), send_platform_info=False)
        for language in theirs.get_target_languages():
            assert theirs.translate_text("a", target_lang=language).text
    with serving([pair], Settings(keys=("key",))) as url:
        assert deepl.DeepLClient("key", server_url=url).get_usage().character.valid
        for call in ("get_usage", "get_source_languages"):
            with pytest.raises(deepl.DeepLException, match="API key"):
                getattr(deepl.DeepLClient("other", server_url=url), call)()


def test_schemathesis_finds_nothing():
    with client(models()) as http:
        schema = schemathesis.openapi.from_url(f"{http.base_url}/openapi.json")

        @settings(
            max_examples=25,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=[*HealthCheck],
        )
        @given(data=st.data())
        def check(operation, data):
            case = data.draw(operation.as_strategy())
            # no schema tells which options of a search exclude each other
            case.call_and_validate(excluded_checks=[positive_data_acceptance])

        for found in schema.get_all_operations():
            check(found.ok())


@given(
    st.text("ab.", max_size=30),
    st.lists(st.text("ab.", min_size=1, max_size=4), max_size=3),
    st.data(),
)
def test_text_ends_at_the_first_stop_string(text, stops, data):
    stopped, found, rest = StopText(stops), "", text
    while rest and not stopped.is_over:
        size = data.draw(st.integers(1, len(rest)))
        found, rest = found + stopped.add(rest[:size]), rest[size:]
        before = text[: len(text) - len(rest)]
        assert stopped.is_over == any(stop in before for stop in stops)
        assert text.startswith(found)
    found += stopped.rest()
    places = [text[: len(text) - len(rest)].find(stop) for stop in stops]
    assert found == text[: min((place for place in places if place >= 0), default=None)]


PIECES = ["<", ">", "</p>", "<b a='", '"', "&lt;", "&", "a", "b\n", "\r", " ", "<!--", "-->", "<?"]


@given(st.lists(st.sampled_from([*PIECES, "<script>", "</script>"]) | st.characters()).map("".join))
def test_parts_make_the_document(text):
    parts = parts_of(text)
    assert "".join(part.content for part in parts) == text
    parts = parts_of(text, is_html=True)
    copies = [Output((ScoredText(one.content, 0.0, 0.0, True),)) for one in parts if one.is_text]
    joined = join_parts(parts, copies, is_html=True)
    assert html.unescape(joined) == html.unescape(text)
    assert joined.count("<") <= text.count("<")
    assert all("\n" not in part.content for part in parts if part.is_text)


@pytest.mark.parametrize("piece", [" ", "<!--", "<a ", "</", "<a x='", "<![", "<script>", "&#"])
def test_parts_are_found_in_linear_time(piece):  # else, this takes minutes
    assert parts_of(f"a{piece * 200_000}a", is_html=True)
