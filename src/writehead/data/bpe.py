"""The tokenizer that we train: sentencepiece BPE that encodes unknown characters as bytes.

All text is normalised here and nowhere else. Decoding the ids of a text gives the normalised text.
"""

import hashlib
import io
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
from numpy.typing import NDArray

from writehead.data.tokenizer import OWN_FILE, Frame, Tokenizer, Tokens, read_limited, threads_for
from writehead.errors import DataError
from writehead.util.files import write_file

PAD, EOS, UNKNOWN = 0, 1, 2
BOS = PAD  # decoding starts from padding, as in the paper's library
MIN_VOCAB_SIZE = 256 + 3 + 1  # bytes, special tokens, and one more
MAX_PIECE = 16  # maximum characters per token
MAX_MARKS = 30  # in a row

# Control characters that are not white space, soft hyphens, zero-width spaces, byte order marks,
# directional and interlinear marks. Joiners stay: emoji and several scripts need them.
INVISIBLE = (
    "[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\xad\u200b\u200e\u200f\u202a-\u202e\u2060-\u2064"
    "\u2066-\u206f\ufeff\ufff9-\ufffb]"
)
_INVISIBLE = re.compile(INVISIBLE)
# Long runs of characters in ranges that include all combining marks. Normalisation takes quadratic
# time, so Unicode's Stream-Safe Text Format allows 30 marks in a row; no language needs more.
_MARKS = re.compile(
    "[\u0300-\u20ff\u2cef-\u2dff\u302a-\u309a\ua66f-\uabff\ufb1e-\ufe2f\U000101fd-\U0001efff]{31,}"
)
_SURROGATE = re.compile("[\ud800-\udfff]")
_PLAIN = re.compile("[!-~]+(?: [!-~]+)*")


def normalise(text: str) -> str:
    """Normalises text for the tokenizer: NFC, one space between words, none at the ends.

    Replaces U+2581, sentencepiece's space, with an underscore. Normalising again changes nothing.
    """
    if _PLAIN.fullmatch(text):
        return text
    if not text.isascii():
        text = _SURROGATE.sub("\ufffd", text).replace("\u2581", "_")
    text = _INVISIBLE.sub("", text)
    text = unicodedata.normalize("NFC", _MARKS.sub(_limit_marks, text))
    return " ".join(_MARKS.sub(_limit_marks, text).split())  # some marks decompose into two


def _limit_marks(run: re.Match[str]) -> str:
    """Removes the combining marks that follow 30 others."""
    kept, marks = [], 0
    for character in run[0]:
        marks = marks + 1 if unicodedata.combining(character) else 0
        if marks <= MAX_MARKS:
            kept.append(character)
    return "".join(kept)


def check_vocab_size(vocab_size: int) -> None:
    """Raises DataError if the vocabulary is too small for any text."""
    if vocab_size < MIN_VOCAB_SIZE:
        raise DataError(f"vocab_size={vocab_size} is too small; use {MIN_VOCAB_SIZE} or more")


class BPETokenizer(Tokenizer):
    """A sentencepiece model; source and target share its vocabulary."""

    eos, unknown, prompt_start = EOS, UNKNOWN, (BOS,)

    def __init__(self, model: bytes, origin: str = "the tokenizer") -> None:
        super().__init__({OWN_FILE: model}, origin)
        self.model = model
        try:
            self._pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
            self._pieces.id_to_piece(list(range(self._pieces.vocab_size())))  # each must be UTF-8
        except (RuntimeError, ValueError) as error:
            raise DataError(f"{origin} is not a sentencepiece model; copy it again") from error
        names = ("pad", "eos", "unk", "bos")
        if [getattr(self._pieces, f"{name}_id")() for name in names] != [PAD, EOS, UNKNOWN, -1]:
            raise DataError(
                f"{origin} does not have our special tokens; add the tokenizer.json that belongs "
                f"to the model"
            )

    @classmethod
    def train(
        cls,
        sentences: Iterable[str],
        vocab_size: int,
        *,
        seed: int = 0,
        fit_vocab_size: bool = False,
        split_digits: bool = False,
    ) -> "BPETokenizer":
        """Trains a tokenizer with `vocab_size` ids; the result is deterministic.

        If the text is too small for so many ids, raises DataError or, with `fit_vocab_size`, uses
        as many as possible. With `split_digits`, each digit is a token.
        """
        check_vocab_size(vocab_size)
        model = io.BytesIO()
        sentencepiece.set_random_generator_seed(seed % 2**32)
        # the model file, and so its fingerprint, records each option that is passed, even a default
        options: dict[str, Any] = {"hard_vocab_limit": False} if fit_vocab_size else {}
        if split_digits:
            options["split_digits"] = True
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=map(normalise, sentences),
                model_writer=model,
                model_type="bpe",
                vocab_size=vocab_size,
                **options,
                byte_fallback=True,
                character_coverage=0.9999,
                normalization_rule_name="identity",
                max_sentencepiece_length=MAX_PIECE,
                pad_id=PAD,
                eos_id=EOS,
                unk_id=UNKNOWN,
                bos_id=-1,
                num_threads=1,
                minloglevel=2,
                max_sentence_length=1 << 16,
            )
        except RuntimeError as error:
            raise DataError(_explain(vocab_size, str(error))) from error
        return cls(model.getvalue())

    @classmethod
    def load(cls, path: Path | str) -> "BPETokenizer":
        """Loads a tokenizer from a file."""
        return cls(read_limited(Path(path)), str(path))

    def save(self, path: Path) -> None:
        """Writes the tokenizer to a file."""
        try:
            write_file(path, self.model)
        except OSError as error:
            raise DataError(f"{path} could not be written: {error.strerror}") from error

    @property
    def vocab_size(self) -> int:
        """The number of token ids."""
        return int(self._pieces.vocab_size())

    @property
    def fingerprint(self) -> str:
        """A hash of the model."""
        return hashlib.sha256(self.model).hexdigest()[:16]

    @property
    def pieces(self) -> list[str]:
        """The text of each id; a space is U+2581."""
        return list(self._pieces.id_to_piece(list(range(self.vocab_size))))

    def is_plain(self, i: int) -> bool:
        """Returns whether a piece is text, not a byte or a special token."""
        return not (
            self._pieces.is_byte(i) or self._pieces.is_control(i) or self._pieces.is_unknown(i)
        )

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, without EOS."""
        return list(self._call(self._pieces.encode, normalise(text)))

    def encode_all(
        self, texts: Iterable[str], *, threads: int | None = None
    ) -> list[NDArray[np.int32]]:
        """Returns the ids of each text, without EOS; a long list uses all cores."""
        clean = [normalise(text) for text in texts]
        options = {"return_type": "numpy", "num_threads": threads_for(clean, threads)}
        return list(self._call(self._pieces.encode, clean, **options))

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of token ids, ignoring PAD and EOS."""
        return str(self._call(self._pieces.decode, [int(i) for i in ids]))

    def decode_all(self, texts: Sequence[Tokens]) -> list[str]:
        """Returns the texts of many sequences of token ids; faster than a `decode` for each."""
        return list(self._call(self._pieces.decode, texts, num_threads=1)) if texts else []

    def normalise(self, text: str) -> str:
        """Returns the normalised form of a text, which is what is encoded."""
        return normalise(text)

    def _frame(self, source: int | None, target: int | None) -> Frame:
        return Frame(after=(EOS,))

    def _call(self, method: Callable[..., Any], argument: object, **options: Any) -> Any:
        """Calls sentencepiece; converts its errors to DataError."""
        try:
            return method(argument, **options)
        except (RuntimeError, ValueError, IndexError) as error:
            raise DataError(f"{self.origin} cannot encode or decode the input: {error}") from error


def _explain(vocab_size: int, error: str) -> str:
    """Returns a clearer message for an error in sentencepiece's training."""
    if "sentences_.empty()" in error:
        return "every line is empty, so no vocabulary can be learned; use text with words"
    if largest := re.search(r"value <= (\d+)", error):
        return f"vocab_size={vocab_size} is too large for this text; use {largest[1]} or less"
    if smallest := re.search(r"smaller than required_chars\. \d+ vs (\d+)", error):
        return f"vocab_size={vocab_size} is too small for this text; use more than {smallest[1]}"
    return f"a vocabulary of {vocab_size} cannot be learned: {error}"
