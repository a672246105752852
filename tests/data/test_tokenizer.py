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
def test_decoding_gives_back_any_text_as_normalised(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == normalise(text)


ODD = "漢字かな|𝔘𝔫𝔦𝔠𝔬𝔡𝔢|👩🏽‍🚀 🇩🇪|עברית العربية|ﬁ ½ ℃ …|<pad> </s> <unk> <0x41>|\U0010ffff"


@pytest.mark.parametrize("text", ODD.split("|"))
def test_odd_text_survives_and_contains_no_special_token(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert min(ids) > 2
    assert tokenizer.decode([PAD, *ids, END, PAD]) == text


def test_batches_are_encoded_like_single_texts(tokenizer):
    texts = sentences(50, seed=2)
    assert tokenizer.encode_all(texts) == [tokenizer.encode(text) for text in texts]


def test_training_is_deterministic(tokenizer):
    again = Tokenizer.train(sentences(300, seed=1), 420)
    assert (again.model, again.vocabulary) == (tokenizer.model, 420)


@pytest.mark.parametrize(
    ("vocabulary", "words"), [(100, "260 or more"), (270, "larger"), (50_000, "smaller")]
)
def test_a_vocabulary_that_does_not_fit_the_text_is_refused(vocabulary, words):
    with pytest.raises(DataError, match=words):
        Tokenizer.train(sentences(20, seed=1), vocabulary)
