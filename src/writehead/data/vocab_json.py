"""Tokenizers that map the pieces of a sentencepiece model to the ids of a `vocab.json`.

Marian (OPUS-MT) has one model for the source and one for the target, M2M-100 one for both. T5 and
mT5 have no `vocab.json`: their ids are those of the sentencepiece model.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import sentencepiece
from numpy.typing import NDArray

from writehead.data.tokenizer import (
    M2M_FILES,
    MARIAN_FILES,
    MAX_ID,
    SPIECE_FILE,
    Files,
    Frame,
    Generation,
    Tokenizer,
    Tokens,
    choose_languages,
    clean_up,
    read_object,
    read_settings,
    threads_for,
    token_text,
)
from writehead.errors import DataError, shown

SPACE = "\u2581"
NAMED = ("unk_token", "eos_token", "pad_token", "bos_token", "sep_token", "cls_token", "mask_token")
# M2M-100's codes in the order of their ids, which no file contains
M2M_CODES = {
    "m2m100": """af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga
        gd gl gu ha he hi hr ht hu hy id ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk
        ml mn mr ms my ne nl no ns oc or pa pl ps pt ro ru sd si sk sl so sq sr ss su sv sw ta th tl
        tn tr uk ur uz vi wo xh yi yo zh zu""",
    "wmt21": "en ha is ja cs ru zh de",
}


class VocabTokenizer(Tokenizer):
    """A sentencepiece model whose pieces have ids in `vocab`."""

    def __init__(self, files: Files, origin: str, spm: str, vocab: dict[str, int]) -> None:
        super().__init__(files, origin)
        self._settings, self._vocab = read_settings(files, origin), vocab
        self._spm: Any = _load_spm(files[spm], f"{origin}/{spm}")
        self.eos, self.unknown = self._id("eos_token", "</s>"), self._id("unk_token", "<unk>")
        self._pieces = [""] * (max(vocab.values()) + 1)
        for piece, i in vocab.items():
            self._pieces[i] = piece
        spm_pieces = self._spm.id_to_piece(list(range(self._spm.vocab_size())))
        self._ids = np.array([vocab.get(one, self.unknown) for one in spm_pieces], np.int32)
        self._specials = self._read_specials()
        self._split = re.compile("|".join(map(re.escape, sorted(self._specials, reverse=True))))
        self._hidden = {vocab[one] for one in self._specials if one in vocab}
        self.suppressed, self.ends, self.forced = Generation.read(files, origin, self.vocab_size)
        self._cleans = self._settings.get("clean_up_tokenization_spaces") is True

    @property
    def vocab_size(self) -> int:
        """One more than the highest token id."""
        return len(self._pieces)

    @property
    def pieces(self) -> list[str]:
        """The text of each id, empty if an id is not used."""
        return list(self._pieces)

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text; special tokens in the text become their ids."""
        [ids] = self.encode_all([text], threads=1)
        return list(ids.tolist())

    def encode_all(
        self, texts: Iterable[str], *, threads: int | None = None
    ) -> list[NDArray[np.int32]]:
        """Returns the ids of each text; a long list uses all cores."""
        given = list(texts)
        options = {"return_type": "numpy", "num_threads": threads_for(given, threads)}
        unknown, encoded = self._spm.unk_id(), self._call(self._spm.encode, given, **options)
        found = []
        for text, ids in zip(given, encoded, strict=True):
            is_plain = unknown not in ids and not self._is_special(text)
            found.append(self._ids[ids] if is_plain else self._encode_slowly(text))
        return found

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of token ids, without special tokens."""
        [text] = self.decode_all([[*ids]])
        return text

    def decode_all(self, texts: Sequence[Tokens]) -> list[str]:
        """Returns the texts of many sequences of token ids."""
        pieces = (self._visible(np.asarray(text).tolist()) for text in texts)
        plain = [self._join(some) for some in pieces]
        return [clean_up(text) for text in plain] if self._cleans else plain

    def _join(self, pieces: list[str]) -> str:
        text = str(self._call(self._spm.decode_pieces, pieces)) if pieces else ""
        return text.replace(SPACE, " ").strip()

    def _visible(self, ids: list[int]) -> list[str]:
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise DataError(f"{self.origin} has no token {max(ids)}; it has {self.vocab_size:,}")
        return [self._pieces[i] for i in ids if i not in self._hidden]

    def _is_special(self, text: str) -> bool:
        """Returns whether a text contains special tokens."""
        return self._split.search(text) is not None

    def _encode_slowly(self, text: str) -> NDArray[np.int32]:
        """Encodes a text with special tokens or unknown pieces."""
        pieces: list[str] = []
        start = 0
        for match in self._split.finditer(text):
            pieces += [*self._plain_pieces(text[start : match.start()]), match[0]]
            start = match.end()
        pieces += self._plain_pieces(text[start:])
        return np.array([self._vocab.get(one, self.unknown) for one in pieces], np.int32)

    def _plain_pieces(self, text: str) -> list[str]:
        return list(self._call(self._spm.encode, text, out_type=str)) if text else []

    def _id(self, name: str, default: str) -> int:
        """Returns the id of a named token."""
        text = token_text(self._settings, name, default)
        if text not in self._vocab:
            raise DataError(f"{self.origin}/vocab.json lacks {name} {shown(text)}; copy it again")
        return self._vocab[text]

    def _read_specials(self) -> set[str]:
        """Returns the special tokens, which are encoded as a whole and not decoded."""
        defaults = dict(zip(NAMED, ("<unk>", "</s>", "<pad>"), strict=False))
        named = [token_text(self._settings, name, defaults.get(name, "")) for name in NAMED]
        for name in ("additional_special_tokens", "extra_special_tokens"):
            more = self._settings.get(name)
            for token in more if isinstance(more, list) else []:
                named.append(token_text({name: token}, name))
        return {name for name in named if name}

    def _call(self, method: Any, argument: object, **options: Any) -> Any:
        """Calls sentencepiece; converts its errors to DataError."""
        try:
            return method(argument, **options)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise DataError(f"{self.origin} cannot encode or decode the input: {error}") from error


class MarianTokenizer(VocabTokenizer):
    """The tokenizer of an OPUS-MT model; `>>deu<<` before a source chooses its target language."""

    def __init__(
        self, files: Files, origin: str = "the tokenizer", *, is_target: bool = False
    ) -> None:
        source, target, vocab = MARIAN_FILES
        is_separate = bool(read_settings(files, origin).get("separate_vocabs"))
        name = "target_vocab.json" if is_target and is_separate else vocab
        if name not in files:
            raise DataError(f"{origin} has no {name}; copy it again")
        super().__init__(
            files, origin, target if is_target else source, _vocab(files, name, origin)
        )
        # Marian itself has no padding token
        self.suppressed = tuple(sorted({*self.suppressed, self._id("pad_token", "<pad>")}))
        languages = {
            piece[2:-2]: i
            for piece, i in self._vocab.items()
            if piece.startswith(">>") and piece.endswith("<<")
        }
        self._hidden |= {*languages.values()}
        self._target = self
        if not is_target:
            self.target_languages = languages
            self._target = MarianTokenizer(files, origin, is_target=True)
            self.suppressed, self.ends = self._target.suppressed, self._target.ends
            self.forced = self._target.forced

    @property
    def target(self) -> Tokenizer:
        """The tokenizer of translations."""
        return self._target

    def decode_all(self, texts: Sequence[Tokens]) -> list[str]:
        """Returns the texts of many translations."""
        if self._target is self:
            return super().decode_all(texts)
        return self._target.decode_all(texts)

    def decode_sources(self, texts: Sequence[Tokens]) -> list[str]:
        """Returns the texts of many sources."""
        return super().decode_all(texts)

    def _is_special(self, text: str) -> bool:
        return text.startswith(">>") or super()._is_special(text)

    def _plain_pieces(self, text: str) -> list[str]:
        end = text.find("<<") + 2 if text.startswith(">>") else 0
        code = [text[:end]] if end > 1 else []
        return code + super()._plain_pieces(text[end if code else 0 :])

    def _frame(self, source: int | None, target: int | None) -> Frame:
        assert self.eos is not None
        return Frame(() if target is None else (target,), (self.eos,), self.forced)


class M2MTokenizer(VocabTokenizer):
    """The tokenizer of an M2M-100 model, with the tokens of its languages after the vocabulary."""

    def __init__(self, files: Files, origin: str = "the tokenizer") -> None:
        spm, name = M2M_FILES
        kind = str(read_settings(files, origin).get("language_codes", "m2m100"))
        if kind not in M2M_CODES:
            known = " and ".join(M2M_CODES)
            raise DataError(f"{origin} has language_codes {shown(kind)}; supported: {known}")
        vocab = _vocab(files, name, origin)
        codes = {code: len(vocab) + i for i, code in enumerate(M2M_CODES[kind].split())}
        vocab |= {f"__{code}__": i for code, i in codes.items()}
        super().__init__(files, origin, spm, vocab)
        self.source_languages = self.target_languages = codes
        self._hidden |= {*codes.values()}

    def _frame(self, source: int | None, target: int | None) -> Frame:
        assert self.eos is not None
        source, target = choose_languages(self, source, target, "en")
        return Frame((source,), (self.eos,), (target,))


class SpieceTokenizer(VocabTokenizer):
    """The tokenizer of a T5 or mT5 model: ids are those of the pieces, followed by extra tokens."""

    def __init__(self, files: Files, origin: str = "the tokenizer") -> None:
        spm = _load_spm(files[SPIECE_FILE], f"{origin}/{SPIECE_FILE}")
        size, count = spm.vocab_size(), read_settings(files, origin).get("extra_ids", 100)
        if type(count) is not int or not 0 <= count <= MAX_ID:
            raise DataError(f"{origin} has extra_ids={shown(count)}, not a count; copy it again")
        vocab = {spm.id_to_piece(i): i for i in range(size)}
        self._extra = {f"<extra_id_{i}>": size + count - 1 - i for i in range(count)}
        super().__init__(files, origin, SPIECE_FILE, vocab | self._extra)

    def _join(self, pieces: list[str]) -> str:
        return "".join(pieces).replace(SPACE, " ").removeprefix(" ")

    def _read_specials(self) -> set[str]:
        return super()._read_specials() | self._extra.keys()

    def _frame(self, source: int | None, target: int | None) -> Frame:
        assert self.eos is not None
        return Frame((), (self.eos,), self.forced)


def _vocab(files: Files, name: str, origin: str) -> dict[str, int]:
    vocab = read_object(files, name, origin)
    if not vocab or not all(type(i) is int and 0 <= i < MAX_ID for i in vocab.values()):
        raise DataError(f"{origin}/{name} must map pieces to ids below {MAX_ID:,}; copy it again")
    return vocab


def _load_spm(content: bytes, path: str) -> Any:
    try:
        spm = sentencepiece.SentencePieceProcessor(model_proto=content)
        spm.id_to_piece(list(range(spm.vocab_size())))  # each must be UTF-8
    except (RuntimeError, ValueError) as error:
        raise DataError(f"{path} is not a sentencepiece model; copy it again") from error
    return spm
