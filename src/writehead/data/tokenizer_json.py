"""Tokenizers stored as `tokenizer.json`, such as those of GPT-2, Llama, Gemma, T5 and NLLB."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import tokenizers
from numpy.typing import NDArray

from writehead.data.tokenizer import (
    JSON_FILE,
    MAX_ID,
    Files,
    Frame,
    Generation,
    Tokenizer,
    Tokens,
    choose_languages,
    clean_up,
    read_settings,
    token_text,
)
from writehead.errors import DataError, one_line

LANGUAGE = re.compile("[a-z]{3}_[A-Z][a-z]{3}")  # NLLB's codes, such as eng_Latn
BYTE = re.compile("<0x[0-9A-F]{2}>")
DEFAULT_SOURCE = "eng_Latn"

T = TypeVar("T")


class JsonTokenizer(Tokenizer):
    """A `tokenizer.json`, with the bos, eos and languages of tokenizer_config.json."""

    def __init__(self, files: Files, origin: str = "the tokenizer") -> None:
        super().__init__(files, origin)
        self._settings = read_settings(files, origin)
        content = files[JSON_FILE]
        self._tokenizer: Any = self._call(lambda: tokenizers.Tokenizer.from_str(content.decode()))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        self._size = max(vocab.values(), default=-1) + 1
        if not 0 < self._size <= MAX_ID:
            raise DataError(
                f"{origin}/{JSON_FILE} has {self._size:,} tokens, not 1 to {MAX_ID:,}; "
                f"copy it again"
            )
        unknown = getattr(self._tokenizer.model, "unk_token", None) or ""
        self.unknown = vocab.get(token_text(self._settings, "unk_token", unknown))
        if b'"ByteFallback"' in content:  # adjacent bytes become text together or not at all
            self.unsettled = {i for piece, i in vocab.items() if BYTE.fullmatch(piece)}
        self.suppressed, self.ends, self.forced = Generation.read(files, origin, self._size)
        # transformers does not clean up the text of BPE models
        is_bpe = type(self._tokenizer.model).__name__ == "BPE"
        self._cleans = not is_bpe and self._settings.get("clean_up_tokenization_spaces") is True
        added = self._tokenizer.get_added_tokens_decoder()
        codes = {one.content: i for i, one in added.items() if LANGUAGE.fullmatch(one.content)}
        self._before, self._after = self._ends(vocab)
        if len(codes) > 1:
            self.source_languages = self.target_languages = codes
            self.eos = vocab.get(token_text(self._settings, "eos_token", "</s>"))
            if self.eos is None:
                raise DataError(f"{origin}/{JSON_FILE} has no eos_token; copy it again")
            self._before, self._after = (), (self.eos,)
        self.prompt_start = self._before

    @property
    def vocab_size(self) -> int:
        """One more than the highest token id."""
        return self._size

    @property
    def pieces(self) -> list[str]:
        """The text of each id, empty if an id is not used."""
        return [self._tokenizer.id_to_token(i) or "" for i in range(self._size)]

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text; special tokens in the text become their ids."""
        encoded = self._call(lambda: self._tokenizer.encode(text, add_special_tokens=False))
        return list(encoded.ids)

    def encode_all(
        self, texts: Iterable[str], *, threads: int | None = None
    ) -> list[NDArray[np.int32]]:
        """Returns the ids of each text; the library chooses the number of threads."""
        given = list(texts)
        encoded = self._call(
            lambda: self._tokenizer.encode_batch_fast(given, add_special_tokens=False)
        )
        return [np.array(one.ids, np.int32) for one in encoded]

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of token ids, without special tokens."""
        [text] = self.decode_all([[*ids]])
        return text

    def decode_all(self, texts: Sequence[Tokens]) -> list[str]:
        """Returns the texts of many sequences of token ids."""
        ids = [np.asarray(text).tolist() for text in texts]
        decoded = self._call(lambda: self._tokenizer.decode_batch(ids, skip_special_tokens=True))
        return [clean_up(text) if self._cleans else text for text in decoded]

    def _frame(self, source: int | None, target: int | None) -> Frame:
        if not self.target_languages:
            return Frame(self._before, self._after, self.forced)
        source, target = choose_languages(self, source, target, DEFAULT_SOURCE)
        if self._settings.get("legacy_behaviour"):
            return Frame((), (*self._after, source), (target,))
        return Frame((source,), self._after, (target,))

    def _ends(self, vocab: Mapping[str, int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the tokens that the tokenizer adds before and after a text."""
        settings, ends = self._settings, dict[str, tuple[int, ...]]()
        # tokenizer_config.json overrides the post-processor
        names = {"bos": "add_bos_token", "eos": "add_eos_token"}
        if self._tokenizer.post_processor is None or settings.keys() & names.values():
            for name, option in names.items():
                token = vocab.get(token_text(settings, f"{name}_token"))
                ends[name] = (token,) if settings.get(option) and token is not None else ()
            return ends["bos"], ends["eos"]
        encode = partial(self._tokenizer.encode, "a")
        whole, plain = self._call(encode), self._call(partial(encode, add_special_tokens=False))
        at = [special == 0 for special in whole.special_tokens_mask]
        first = at.index(True) if any(at) else len(at)
        return tuple(whole.ids[:first]), tuple(whole.ids[first + len(plain.ids) :])

    def _call(self, method: Callable[[], T]) -> T:
        """Calls the library; converts its errors to DataError."""
        try:
            return method()
        except BaseException as error:  # the library's panics are not Exceptions
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            reason = one_line(str(error), 200)
            raise DataError(
                f"{self.origin}/{JSON_FILE} is damaged or cannot encode or decode the input: "
                f"{reason}"
            ) from error
