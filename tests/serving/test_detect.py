"""Languages are detected among those of the models, and `auto` chooses a model by them."""

import libretranslatepy
import pytest

from servers import client, models
from texts import engine
from writehead.serving.detect import Detector
from writehead.serving.models import NAMES, Served, find_code

TEXTS = {
    "en": "The committee will publish its report in the spring.",
    "de": "Der Ausschuss wird seinen Bericht im Frühjahr veröffentlichen.",
    "fr": "La commission publiera son rapport au printemps.",
}


@pytest.fixture(scope="module")
def several():
    """A server from English and French to German, and from German to English."""
    served = models()
    for name in ("fr-de", "de-en"):
        source, target = name.split("-")
        served.append(
            Served(name, engine("translation", d=24 if source == "fr" else 32), (source, target))
        )
    with client(served) as http:
        yield served, http


def test_languages_are_ranked():
    detector = Detector(["de", "en_XX", "fr", "xx"])
    for code, text in TEXTS.items():
        ranked = detector.rank([text])
        assert ranked[0].language == ("en_XX" if code == "en" else code)
        assert sum(one.confidence for one in ranked) == pytest.approx(100.0)
    assert {one.language for one in detector.rank([""])} == {"de", "en_XX", "fr"}
    assert Detector([]).rank([TEXTS["fr"]])[0].language == "fr"


def test_every_detected_language_can_be_one_of_nllb():
    labels = {one.language for one in Detector([]).rank(["text"])}
    codes = [f"{long}_Latn" for code, (_, long) in NAMES.items() if code in labels]
    assert len(codes) > 90
    assert len({*codes}) == len(codes)
    for code, (_, long) in NAMES.items():
        assert find_code(code, codes) in (f"{long}_Latn", None)
    catalan = "La comissió publicarà el seu informe a la primavera, segons van dir ahir."
    assert Detector(["ca", "es", "pt"]).rank([catalan])[0].language == "ca"


def test_libretranslate_detects(several):
    _, http = several
    theirs = libretranslatepy.LibreTranslateAPI(str(http.base_url))
    for code, text in TEXTS.items():
        best, *others = theirs.detect(text)
        assert best["language"] == code
        assert 50 < best["confidence"] <= 100
        assert all(one["confidence"] >= 1 for one in others)
        assert http.post("/detect", json={"q": text}).json()[0] == best
    assert http.post("/detect", json={"q": "x" * 60_000}).status_code == 422
    assert http.post("/detect", json={"p": "x"}).status_code == 422
    assert http.get("/detect").status_code == 405


def test_auto_chooses_a_model_by_the_language(several):
    served, http = several
    for code, one in (("en", served[0]), ("fr", served[2])):
        text = TEXTS[code]
        [output] = one.engine.translate([text])
        body = {"q": [text, text], "source": "auto", "target": "de"}
        answer = http.post("/translate", json=body).json()
        assert answer["translatedText"] == [output.text] * 2
        assert [found["language"] for found in answer["detectedLanguage"]] == [code] * 2
        answer = http.post("/v2/translate", json={"text": [text], "target_lang": "DE"}).json()
        [found] = answer["translations"]
        assert (found["detected_source_language"], found["text"]) == (code.upper(), output.text)
        body = {"text": text, "source": "auto", "target": "de"}
        assert http.post("/v1/translate", json=body).json()["model"] == one.name


def test_auto_takes_a_language_that_a_model_translates(several):
    served, http = several
    [output] = served[0].engine.translate([TEXTS["de"]])
    body = {"q": TEXTS["de"], "source": "auto", "target": "de"}
    answer = http.post("/translate", json=body).json()
    assert answer["detectedLanguage"]["language"] in ("en", "fr")
    assert answer["detectedLanguage"]["confidence"] < 50
    assert http.post("/translate", json={**body, "target": "xx"}).status_code == 404
    body = {"text": TEXTS["de"], "source": "auto", "target": "de", "model": "toy-en-de"}
    assert http.post("/v1/translate", json=body).json()["translations"][0]["text"] == output.text
