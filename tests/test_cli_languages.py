"""`--source-lang` and `--target-lang` of translate, evaluate and bench translate."""

import json

import pytest

from foreign_tokenizers import foreign_engine
from texts import sentences
from writehead.config import DecodeConfig
from writehead.runs import save_run

LINES = sentences(4)
TO_GERMAN = ["--source-lang=fra_Latn", "--target-lang=deu_Latn"]


@pytest.fixture(scope="module")
def nllb(tmp_path_factory):
    """An engine, and the folder of its run."""
    folder = tmp_path_factory.mktemp("languages")
    made, _ = foreign_engine(folder / "files", "nllb", "translation")
    save_run(folder / "run", made.model, tokenizer=made.tokenizer)
    return made, folder / "run"


@pytest.mark.parametrize("target", ["deu_Latn", "ita_Latn"])
def test_lines_are_translated_between_the_given_languages(writehead, nllb, target):
    made, run = nllb
    options = ["--beam=2", "--max-length=9", "--device=cpu", "--dtype=float64"]
    languages = ["--source-lang=fra_Latn", f"--target-lang={target}"]
    text = "\n".join(LINES).encode()
    code, out, err = writehead("translate", str(run), *options, *languages, stdin=text)
    outputs = made.translate(
        *(LINES, DecodeConfig(beam=2, max_length=9)),
        source_lang="fra_Latn",
        target_lang=target,
    )
    assert (code, err) == (0, "")
    assert out.split("\n") == [*(" ".join(output.text.split("\n")) for output in outputs), ""]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "translates between 202 languages; set target_lang"),
        (["--target-lang=deu_Lat"], "'deu_Lat' is unknown; close codes: 'deu_Latn'"),
    ],
)
def test_unknown_languages_are_one_sentence(writehead, nllb, given, words):
    code, out, err = writehead("translate", str(nllb[1]), "--device=cpu", *given, stdin=b"a\n")
    assert (code, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1


def test_evaluate_and_bench_translate_between_the_given_languages(writehead, nllb, tmp_path):
    _, run = nllb
    (tmp_path / "fr").write_text("\n".join(LINES))
    (tmp_path / "de").write_text("\n".join(sentences(4, seed=1)))
    evaluate = ["evaluate", str(run), f"--source={tmp_path / 'fr'}", "--search=greedy", "--json"]
    evaluate += [f"--reference={tmp_path / 'de'}", "--device=cpu", *TO_GERMAN]
    code, out, err = writehead(*evaluate)
    assert code == 0, err
    assert json.loads(out)["sentences"] == 4
    bench = ["bench", "translate", str(run), f"--input={tmp_path / 'fr'}", "--repeats=1"]
    bench += ["--no-peers", "--beam=1", "--device=cpu", f"--output={tmp_path / 'record'}"]
    code, _, err = writehead(*bench, *TO_GERMAN)
    assert code == 0, err
    searches = json.loads((tmp_path / "record").read_text())["engines"]["ours"]
    assert searches["searches"]["greedy"]["equal_lines"] == 4
