"""Tokenizers of other model families, against those of transformers."""

import json
import random

import pytest
import transformers

import foreign_tokenizers
from writehead.data.tokenizer import TOKENIZER_FILES, load_tokenizer, read_tokenizer
from writehead.errors import ConfigError, DataError

LANGUAGES = {"m2m": ("fr", "de"), "nllb": ("fra_Latn", "deu_Latn")}


@pytest.fixture(scope="module", params=foreign_tokenizers.MAKERS)
def pair(request, tmp_path_factory):
    """Their tokenizer, ours, and the languages to translate between."""
    folder = tmp_path_factory.mktemp("tokenizer")
    theirs = foreign_tokenizers.MAKERS[request.param](folder)
    languages = LANGUAGES.get(request.param.removesuffix("-legacy"), (None, None))
    if languages[0]:
        theirs.src_lang, theirs.tgt_lang = languages
    return theirs, load_tokenizer(folder), languages


def test_a_thousand_lines_have_the_same_ids_as_in_transformers(pair):
    theirs, ours, languages = pair
    frame, lines = ours.frame(*languages), foreign_tokenizers.lines(1200)
    if "spiece.model" in ours.files and "tokenizer.json" not in ours.files:
        # transformers' copy of sentencepiece's normalization drops one
        # of two combining marks, and chooses another one of several equally likely sequences
        lines = [line for line in lines if "\u0301\u0323" not in line and "xxx" not in line]
    assert len(lines) >= 1000
    encoded = [ids.tolist() for ids in ours.encode_all(lines)]
    assert [[*frame.before, *ids, *frame.after] for ids in encoded] == theirs(lines).input_ids
    assert encoded[:99] == [ours.encode(line) for line in lines[:99]]
    if languages == (None, None) and not frame.after:  # of a language model
        assert ours.prompt_start == tuple(theirs("").input_ids)
    plain = [line for line in lines if "<" not in line and "__" not in line and "_Latn" not in line]
    targets = theirs(text_target=plain, add_special_tokens=False).input_ids
    assert [ids.tolist() for ids in ours.target.encode_all(plain)] == targets


def test_ids_have_the_same_text_as_in_transformers_without_special_tokens(pair):
    theirs, ours, _ = pair
    draw, size = random.Random(5), ours.target.vocab_size
    # transformers gives all padding one id, and decodes OPUS-MT's language codes
    hidden = {*ours.suppressed}
    if not ours.source_languages:
        hidden |= {*ours.target_languages.values()}
    ids = [[draw.randrange(size) for _ in range(draw.randint(0, 9))] for _ in range(500)]
    ids = [[i for i in text if i not in hidden] for text in ids]
    ids += [some.tolist() for some in ours.target.encode_all(["the cat", "日本語 é", "", "a  b "])]
    assert ours.decode_all(ids) == [theirs.decode(text, skip_special_tokens=True) for text in ids]
    assert [ours.decode(text) for text in ids[:9]] == ours.decode_all(ids[:9])


@pytest.mark.parametrize("name", ["marian", "m2m", "t5", "spiece", "gpt2", "llama"])
def test_spaces_are_cleaned_up_as_in_transformers(tmp_path, name):
    foreign_tokenizers.MAKERS[name](tmp_path)
    file = tmp_path / "tokenizer_config.json"
    settings = json.loads(file.read_text()) | {"clean_up_tokenization_spaces": True}
    file.write_text(json.dumps(settings))
    auto = transformers.T5Tokenizer if name == "spiece" else transformers.AutoTokenizer
    theirs = auto.from_pretrained(tmp_path)
    ours, draw = load_tokenizer(tmp_path), random.Random(2)
    lines = ["a . b ? c ! d , e ' f", "do n't I 'm he 's we 've you 're", "a.b ' . 's", ""]
    ids = [ids.tolist() for ids in ours.target.encode_all(lines)]
    ids += [[draw.randrange(9, 100) for _ in range(9)] for _ in range(200)]
    expected = [theirs.decode(text, skip_special_tokens=True) for text in ids]
    assert ours.decode_all(ids) == expected


def test_settings_of_the_generation_are_read_from_either_file(tmp_path):
    foreign_tokenizers.gpt2(tmp_path)
    values = {"bad_words_ids": [[5], [6, 7]], "suppress_tokens": [9, 999_999]}
    values |= {"eos_token_id": [3, 2], "forced_bos_token_id": 8}
    old = {"model_type": "gpt2", "vocab_size": 400} | values
    (tmp_path / "config.json").write_text(json.dumps(old))
    for made in (load_tokenizer(tmp_path), load_tokenizer(tmp_path)):
        found = made.suppressed, made.ends, made.forced, made.frame().forced
        assert found == ((5, 9), (2, 3), (8,), (8,))
        (tmp_path / "config.json").unlink(missing_ok=True)
        (tmp_path / "generation_config.json").write_text(json.dumps(values))
    (tmp_path / "config.json").write_text(json.dumps(old))
    (tmp_path / "generation_config.json").write_text("{}")  # has all values, as in transformers
    assert load_tokenizer(tmp_path).ends == load_tokenizer(tmp_path).suppressed == ()


def test_each_id_has_its_piece_and_equal_files_an_equal_fingerprint(pair, tmp_path):
    theirs, ours, _ = pair
    is_separate = ours.target.pieces != ours.pieces
    for i, piece in enumerate(ours.target.pieces):
        if piece and not (is_separate and i in ours.suppressed):
            assert theirs.convert_ids_to_tokens(i) == piece
    for name, content in ours.files.items():
        assert name in TOKENIZER_FILES
        (tmp_path / name).write_bytes(content)
    again = load_tokenizer(tmp_path)
    assert again.fingerprint == ours.fingerprint
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert load_tokenizer(tmp_path).fingerprint != ours.fingerprint


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        ("nllb", ("fra_Latn", "deu_Lat"), r"'deu_Lat' is unknown; close codes: 'deu_Latn'"),
        ("nllb", ("en", "deu_Latn"), "source_lang='en' is unknown; close codes: .*'eng_Latn'"),
        ("nllb", (None, None), "translates between 202 languages; set target_lang, such as"),
        ("m2m", (None, None), "translates between 100 languages; set target_lang, such as zu"),
        ("m2m", (None, "qq9"), "'qq9' is unknown; choose from af, am"),
        ("marian", ("en", None), "source_lang='en': this model has no such codes"),
        ("marian", (None, "de"), "'de' is unknown; close codes: 'deu'"),
        ("gpt2", (None, "de"), "no such codes; leave it out"),
    ],
)
def test_languages_that_a_model_does_not_have_are_errors(tmp_path, name, given, words):
    foreign_tokenizers.MAKERS[name](tmp_path)
    with pytest.raises(ConfigError, match=words):
        load_tokenizer(tmp_path).frame(*given)


def test_language_codes_may_be_written_like_their_tokens(tmp_path):
    foreign_tokenizers.marian(tmp_path)
    made = load_tokenizer(tmp_path)
    assert made.frame(None, "deu") == made.frame(None, ">>deu<<")
    [line] = made.encode_all([">>deu<< the cat"])
    assert line.tolist() == [*made.frame(None, "deu").before, *made.encode(" the cat")]
    (tmp_path / "generation_config.json").write_text('{"bad_words_ids": [[5], [6, 7]]}')
    assert load_tokenizer(tmp_path).suppressed == tuple(sorted((5, *made.suppressed)))


@pytest.mark.parametrize(
    ("name", "file", "content", "words"),
    [
        ("marian", "vocab.json", b"{", "vocab.json is not JSON"),
        ("marian", "vocab.json", b"[1]", "not an object"),
        ("marian", "vocab.json", b'{"a": -1}', "must map pieces to ids"),
        ("marian", "vocab.json", b'{"a": 1}', "lacks eos_token '</s>'"),
        ("marian", "vocab.json", b'{"a": 99999999}', "must map pieces to ids"),
        ("marian", "target.spm", b"\x00\x01", "target.spm is not a sentencepiece model"),
        ("marian", "tokenizer_config.json", b'{"separate_vocabs": true}', "no target_vocab.json"),
        ("m2m", "tokenizer_config.json", b'{"language_codes": "x"}', "supported: m2m100 and wmt21"),
        ("gpt2", "tokenizer.json", b"{}", "tokenizer.json is damaged"),
        ("gpt2", "tokenizer.json", b"\xff", "tokenizer.json is damaged"),
        ("nllb", "tokenizer_config.json", b'{"eos_token": "end"}', "has no eos_token"),
    ],
)
def test_damaged_files_are_errors(tmp_path, name, file, content, words):
    foreign_tokenizers.MAKERS[name](tmp_path)
    (tmp_path / file).write_bytes(content)
    with pytest.raises(DataError, match=words):
        load_tokenizer(tmp_path)


def test_a_folder_without_a_tokenizer_and_a_huge_file_are_errors(tmp_path):
    with pytest.raises(DataError, match=r"has no complete tokenizer; it needs tokenizer\.model"):
        load_tokenizer(tmp_path)
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(65 << 20)
    with pytest.raises(DataError, match="has more than 67,108,864 bytes"):
        load_tokenizer(tmp_path)
    assert read_tokenizer(tmp_path / "..") == {}


@pytest.mark.parametrize("name", ["gpt2", "nllb", "t5"])
def test_a_changed_byte_of_tokenizer_json_never_ends_in_another_error(tmp_path, name):
    foreign_tokenizers.MAKERS[name](tmp_path)
    path, draw = tmp_path / "tokenizer.json", random.Random(11)
    whole = path.read_bytes()
    for _ in range(60):
        changed = bytearray(whole)
        changed[draw.randrange(len(whole))] = draw.randrange(256)
        path.write_bytes(changed)
        try:
            made = load_tokenizer(tmp_path)
            made.decode(made.encode("the cat sees"))
        except DataError:
            continue
