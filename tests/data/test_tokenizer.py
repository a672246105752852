import pytest
from hypothesis import given
from hypothesis import strategies as st

from corpora import sentences
from writehead.data.cleaning import normalise
from writehead.data.tokenizer import END, PAD, Tokenizer
from writehead.errors import DataError


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(sentences(300, seed=1), 420)


@given(st.text())
def test_ids_give_back_any_text_as_it_was_normalised(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == normalise(text)


@pytest.mark.parametrize(
    "text",
    [
        "漢字かな",
        "𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
        "👩🏽‍🚀 🇩🇪",
        "עברית العربية",
        "ﬁ ½ ℃ …",
        "<pad> </s> <unk> <0x41>",
        "\U0010ffff",
    ],
)
def test_odd_text_survives(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_no_text_holds_a_special_token(tokenizer):
    ids = tokenizer.encode("<pad> </s> <unk> ⁇ \x00 end.")
    assert min(ids) > 2


def test_padding_and_end_say_nothing(tokenizer):
    ids = tokenizer.encode("Kalomi tü.")
    assert tokenizer.decode([PAD, *ids, END, PAD]) == "Kalomi tü."


def test_many_texts_are_encoded_as_one_by_one(tokenizer):
    texts = sentences(50, seed=2)
    assert tokenizer.encode_all(texts) == [tokenizer.encode(text) for text in texts]


def test_training_again_gives_the_same_model(tokenizer):
    again = Tokenizer.train(sentences(300, seed=1), 420)
    assert again.model == tokenizer.model
    assert again.vocabulary == 420


@pytest.mark.parametrize(
    ("vocabulary", "words"),
    [
        (100, "ask for 260 or more"),
        (270, "bytes and characters need alone; ask for a larger one"),
        (50_000, "at most, not 50000; ask for a smaller one"),
    ],
)
def test_a_vocabulary_that_does_not_fit_the_text_is_refused_with_the_one_that_does(
    vocabulary, words
):
    with pytest.raises(DataError, match=words):
        Tokenizer.train(sentences(20, seed=1), vocabulary)
