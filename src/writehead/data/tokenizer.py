"""Text to token ids and back: sentencepiece BPE with byte fallback, so that no text is unknown.

Ids 0, 1 and 2 are padding, end and unknown. A decoder starts from padding, as in the paper's
library, so there is no start token of its own. Text is normalised here and nowhere else, so a
model is asked in the form it was trained on, and ids give back the normalised text exactly.
"""

import hashlib
import io
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import sentencepiece

from writehead.data.cleaning import normalise
from writehead.errors import DataError
from writehead.util.files import write_file

PAD, EOS, UNKNOWN = 0, 1, 2
BYTES = 256  # byte fallback has a token for each
MAX_PIECE = 16  # characters of the longest token
MAX_BYTES = 64 << 20  # size limit of a tokenizer file


def check_vocab_size(vocab_size: int) -> None:
    """Raises where no text, however it is, could fill so few ids."""
    if vocab_size < BYTES + 3 + 1:
        raise DataError(
            f"vocab_size={vocab_size} has no room for 256 bytes and the special tokens; ask for "
            f"{BYTES + 4} or more"
        )


class Tokenizer:
    """One vocabulary for all sides; a sentencepiece model and nothing else."""

    def __init__(self, model: bytes, origin: str = "the tokenizer") -> None:
        self.model, self._origin = model, origin
        try:
            self._pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
            self._pieces.id_to_piece(list(range(self._pieces.vocab_size())))  # each must be UTF-8
        except (RuntimeError, ValueError) as error:
            raise DataError(
                f"{origin} is not a sentencepiece model, or is damaged; make or copy it again"
            ) from error
        if (self._pieces.pad_id(), self._pieces.eos_id()) != (PAD, EOS):
            raise DataError(
                f"{origin} has padding {self._pieces.pad_id()} and end {self._pieces.eos_id()}, "
                f"not {PAD} and {EOS}; train one with `writehead prepare`"
            )

    @classmethod
    def train(
        cls, sentences: Iterable[str], vocab_size: int, *, seed: int = 0, at_most: bool = False
    ) -> "Tokenizer":
        """Trains a tokenizer of `vocab_size` ids on `sentences`; the result is deterministic.

        Raises DataError if the text is too small for so many ids; with `at_most`, the tokenizer
        has fewer ids instead.
        """
        check_vocab_size(vocab_size)
        model = io.BytesIO()
        sentencepiece.set_random_generator_seed(seed % 2**32)
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=map(normalise, sentences),
                model_writer=model,
                model_type="bpe",
                vocab_size=vocab_size,
                hard_vocab_limit=not at_most,
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
            raise DataError(_why_not(vocab_size, str(error))) from error
        return cls(model.getvalue())

    @classmethod
    def load(cls, path: Path | str) -> "Tokenizer":
        """The tokenizer in a file that `save` wrote."""
        try:
            with Path(path).open("rb") as file:
                model = file.read(MAX_BYTES + 1)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}; check the path") from error
        if len(model) > MAX_BYTES:
            raise DataError(
                f"{path} has more than {MAX_BYTES:,} bytes, so it is not a tokenizer; check the "
                f"path"
            )
        return cls(model, str(path))

    def save(self, path: Path) -> None:
        """Writes the model to a file."""
        try:
            write_file(path, self.model)
        except OSError as error:
            raise DataError(f"{path} could not be written: {error.strerror}") from error

    @property
    def vocab_size(self) -> int:
        """How many ids there are."""
        return int(self._pieces.vocab_size())

    @property
    def fingerprint(self) -> str:
        """What tells two tokenizers apart."""
        return hashlib.sha256(self.model).hexdigest()[:16]

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without the end token."""
        clean = normalise(text)
        with self._explained():
            ids: list[int] = self._pieces.encode(clean)
        return ids

    def encode_all(self, texts: Iterable[str], *, threads: int = -1) -> list[list[int]]:
        """The ids of many texts; by default with a thread for each core."""
        clean = [normalise(text) for text in texts]
        with self._explained():
            ids: list[list[int]] = self._pieces.encode(clean, num_threads=threads)
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids; padding and end say nothing."""
        known = [int(i) for i in ids if i not in (PAD, EOS)]
        with self._explained():
            text: str = self._pieces.decode(known)
        return text

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turns errors of sentencepiece into DataError."""
        try:
            yield
        except (RuntimeError, ValueError, IndexError) as error:
            raise DataError(
                f"{self._origin} cannot encode or decode the input: {error}; check the input, or "
                f"make the tokenizer again"
            ) from error


def _why_not(vocab_size: int, error: str) -> str:
    """Why sentencepiece learnt nothing, in a sentence."""
    if "sentences_.empty()" in error:
        return "every line is empty, so no vocabulary can be learnt; use a text with words"
    most = re.search(r"value <= (\d+)", error)
    if most:
        return (
            f"this text gives a vocabulary of {most[1]} at most, not {vocab_size}; ask for a "
            f"smaller one or give more text"
        )
    least = re.search(r"smaller than required_chars\. \d+ vs (\d+)", error)
    if least:
        return (
            f"vocab_size={vocab_size} is smaller than the {least[1]} that this text's bytes and "
            f"characters need alone; ask for a larger one"
        )
    return (
        f"no vocabulary of {vocab_size} can be learnt from this text ({error}); give more text or "
        f"a smaller vocabulary"
    )
