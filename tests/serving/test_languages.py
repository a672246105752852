"""Models of several languages are chosen by the codes that clients know."""

import json

from foreign_tokenizers import foreign_engine
from servers import client, models
from texts import sentences
from writehead.config import DecodeConfig
from writehead.serving.models import Served, find_code

LINES = sentences(3)


def test_codes_are_found_without_regions():
    known = ["deu_Latn", "eng_Latn", "zho_Hans", "zho_Hant"]
    wanted = ["de", "de-DE", "eng", "eng_Latn", "zh", "ZHO_Hant", "fr", "english"]
    found = ["deu_Latn", "deu_Latn", "eng_Latn", "eng_Latn", "zho_Hans", "zho_Hans", None, None]
    assert [find_code(one, known) for one in wanted] == found


def test_a_model_of_many_languages(tmp_path):
    many, _ = foreign_engine(tmp_path / "files", "nllb", "translation")
    pair = models()[0]
    with client([pair, Served("nllb", many)]) as http:
        first = [one.text for one in pair.engine.translate(LINES)]
        options = DecodeConfig(beam=1)
        expected = [
            one.text
            for one in many.translate(LINES, source_lang="fra_Latn", target_lang="deu_Latn")
        ]
        body = {"q": LINES, "source": "en", "target": "de"}
        assert http.post("/translate", json=body).json()["translatedText"] == first
        body["source"] = "fr"
        assert http.post("/translate", json=body).json()["translatedText"] == expected
        body = {"text": LINES, "source_lang": "FR", "target_lang": "DE"}
        answer = http.post("/v2/translate", json=body).json()
        assert [one["text"] for one in answer["translations"]] == expected
        body = {"text": LINES[0], "model": "nllb", "source": "fra_Latn", "stream": True, "beam": 1}
        answer = http.post("/v1/translate", json={**body, "target": "de"})
        [output] = many.translate(
            LINES[:1], options, source_lang="fra_Latn", target_lang="deu_Latn"
        )
        *_, last, done = [one for one in answer.text.split("\n\n") if one]
        translations = json.loads(last.removeprefix("data: "))["translations"]
        assert [one["text"] for one in translations] == [output.text]
        assert done == "data: [DONE]"
        refused = http.post("/v1/translate", json=body)
        assert refused.status_code == 422
        assert "languages" in refused.text
        assert http.post("/v1/translate", json={**body, "target": "xx"}).status_code == 404
        listed = {one["code"]: one for one in http.get("/languages").json()}
        assert {"de", "fr"} <= set(listed["en"]["targets"])
        assert listed["fr"]["name"] == "French"
        assert len(listed) > 150
        page = http.get("/page.json").json()["models"][1]
        assert "deu_Latn" in page["codes"][1]


def test_pairs_have_no_codes():
    assert models()[0].codes("en-GB", "DE") == {}
    assert models()[0].codes("auto", None) == {}
    assert models()[0].codes("en", "fr") is None
    assert models()[1].codes(None, None) is None
