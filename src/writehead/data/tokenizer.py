"""The interface of all tokenizers: text to token ids and back, with special tokens around them.

A folder holds the files of one tokenizer: ours, `tokenizer.json`, T5's `spiece.model`, or
sentencepiece models with `vocab.json`. Reading them executes no code.
"""

import difflib
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence, Set
from operator import gt
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from writehead.config import ModelConfig
from writehead.errors import ConfigError, DataError, one_line, shown
from writehead.util.json_files import JsonError, parse_json

Tokens = Sequence[int] | NDArray[np.int32]
Files = Mapping[str, bytes]  # contents by name

OWN_FILE, JSON_FILE = "tokenizer.model", "tokenizer.json"
MARIAN_FILES = ("source.spm", "target.spm", "vocab.json")
M2M_FILES = ("sentencepiece.bpe.model", "vocab.json")
SPIECE_FILE = "spiece.model"
SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
# all files that a tokenizer may have; some are only for other libraries
TOKENIZER_FILES = (
    *(OWN_FILE, JSON_FILE, *MARIAN_FILES, "target_vocab.json", M2M_FILES[0], *SETTINGS),
    *("added_tokens.json", "merges.txt", SPIECE_FILE, "chat_template.jinja"),
)
# older repositories have some of these in config.json instead of generation_config.json
GENERATION = (
    *("bad_words_ids", "suppress_tokens", "begin_suppress_tokens"),
    *("forced_bos_token_id", "eos_token_id"),
)
KINDS = ((OWN_FILE,), (JSON_FILE,), (SPIECE_FILE,), MARIAN_FILES, M2M_FILES)
# what transformers cleans up in English text if a tokenizer's settings ask for it
CLEAN_UP = {f" {mark}": mark.strip() for mark in (*".?!,", "' ", "n't", "'m", "'s", "'ve", "'re")}
MAX_BYTES = 64 << 20  # size limit of a tokenizer file
MAX_ID = 1 << 24  # size limit of a vocabulary
MIN_TEXTS_FOR_THREADS = 64  # starting threads takes longer than encoding fewer texts


class Frame(NamedTuple):
    """The tokens before and after a source, and the tokens that its translation begins with."""

    before: Tokens = ()
    after: Tokens = ()
    forced: tuple[int, ...] = ()


class Tokenizer(ABC):
    """Converts text to token ids and back.

    `files` maps file names to contents; messages name `origin` as their location.
    """

    eos: int | None = None  # None: the model's config decides
    unknown: int | None = None
    prompt_start: tuple[int, ...] = ()  # the tokens before a prompt
    suppressed: tuple[int, ...] = ()  # tokens that a model must not generate
    ends: tuple[int, ...] = ()  # all tokens that end a text, if there are several
    forced: tuple[int, ...] = ()  # tokens that all translations begin with
    unsettled: Set[int] = frozenset()  # tokens whose text can depend on later tokens
    source_languages: Mapping[str, int] = {}  # the tokens of language codes such as eng_Latn
    target_languages: Mapping[str, int] = {}

    def __init__(self, files: Files, origin: str) -> None:
        self.files, self.origin = files, origin

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """The number of token ids."""

    @property
    @abstractmethod
    def pieces(self) -> list[str]:
        """The text of each id, as in the files."""

    @property
    def fingerprint(self) -> str:
        """A hash of the files."""
        hashes = (hashlib.sha256(self.files[name]).hexdigest() for name in sorted(self.files))
        return hashlib.sha256("".join(hashes).encode()).hexdigest()[:16]

    @property
    def target(self) -> "Tokenizer":
        """The tokenizer of the target side, if source and target differ."""
        return self

    def normalise(self, text: str) -> str:
        """Returns the normalised form of a text, which is what is encoded."""
        return text

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, without the tokens of its frame."""

    @abstractmethod
    def encode_all(
        self, texts: Iterable[str], *, threads: int | None = None
    ) -> list[NDArray[np.int32]]:
        """Returns the ids of each text, without frames; a long list uses all cores."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of token ids that a model generated, without special tokens."""

    @abstractmethod
    def decode_all(self, texts: Sequence[Tokens]) -> list[str]:
        """Returns the texts of many sequences of token ids; faster than a `decode` for each."""

    def check_fits(self, config: ModelConfig) -> None:
        """Raises DataError unless a model has all of the tokens and the same end token."""
        sizes = self.vocab_size, self.target.vocab_size
        limits = config.source_vocab_size or config.vocab_size, config.vocab_size
        eos = config.eos if self.eos is None else self.eos
        if any(map(gt, sizes, limits)) or eos != config.eos:
            raise DataError(
                f"the tokenizer ({max(sizes)} tokens, eos={eos}) does not fit the model "
                f"({min(limits)} tokens, eos={config.eos}); use the one it was trained with"
            )

    def frame(self, source_lang: str | None = None, target_lang: str | None = None) -> Frame:
        """Returns what surrounds a source in these languages; raises if a code is unknown."""
        return self._frame(
            _find_language("source_lang", source_lang, self.source_languages),
            _find_language("target_lang", target_lang, self.target_languages),
        )

    @abstractmethod
    def _frame(self, source: int | None, target: int | None) -> Frame:
        """Returns the frame of a source, given the tokens of its languages."""

    def decode_sources(self, texts: Sequence[Tokens]) -> list[str]:
        """Returns the texts of many sources, which may have a vocabulary of their own."""
        return self.decode_all(texts)


def load_tokenizer(folder: Path | str) -> Tokenizer:
    """Loads the tokenizer of a folder, whose files determine its kind."""
    folder = Path(folder)
    files = read_tokenizer(folder)
    # imported here, because these modules load libraries
    if files.keys() >= {*MARIAN_FILES}:
        from writehead.data.vocab_json import MarianTokenizer

        return MarianTokenizer(files, str(folder))
    if JSON_FILE in files:
        from writehead.data.tokenizer_json import JsonTokenizer

        return JsonTokenizer(files, str(folder))
    if files.keys() >= {*M2M_FILES}:
        from writehead.data.vocab_json import M2MTokenizer

        return M2MTokenizer(files, str(folder))
    if SPIECE_FILE in files:
        from writehead.data.vocab_json import SpieceTokenizer

        return SpieceTokenizer(files, str(folder))
    if OWN_FILE in files:
        from writehead.data.bpe import BPETokenizer

        return BPETokenizer(files[OWN_FILE], str(folder / OWN_FILE))
    kinds = ", or ".join(" + ".join(names) for names in KINDS)
    raise DataError(f"{folder} has no complete tokenizer; it needs {kinds}")


def has_tokenizer(folder: Path) -> bool:
    """Returns whether a folder has the files that `load_tokenizer` needs."""
    present = {path.name for path in tokenizer_files(folder)}
    return any(present >= {*names} for names in KINDS)


def tokenizer_files(folder: Path) -> list[Path]:
    """Returns the files in a folder that belong to a tokenizer."""
    return [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]


def read_tokenizer(path: Path) -> dict[str, bytes]:
    """Reads the files of a tokenizer from a folder, or one file, by name.

    If a folder of another library has no generation_config.json, its values are in config.json.
    """
    if path.is_dir():
        files = {file.name: read_limited(file) for file in tokenizer_files(path)}
        config = path / "config.json"
        if SETTINGS[2] not in files and config.is_file():
            data = read_object({config.name: read_limited(config)}, config.name, str(path))
            values = {name: data[name] for name in GENERATION if data.get(name) is not None}
            if "model_type" in data and values:
                files[SETTINGS[2]] = json.dumps(values).encode()
        return files
    return {path.name if path.name in TOKENIZER_FILES else OWN_FILE: read_limited(path)}


def read_limited(path: Path) -> bytes:
    """Reads a tokenizer's file; raises DataError if that is impossible or it is too large."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; check the path") from error
    if len(content) > MAX_BYTES:
        raise DataError(f"{path} has more than {MAX_BYTES:,} bytes; a tokenizer has fewer")
    return content


def read_object(files: Files, name: str, origin: str) -> dict[str, Any]:
    """Parses one of a tokenizer's files as a JSON object; a missing file gives an empty one."""
    try:
        value = parse_json(files.get(name, b"{}").decode())
    except ValueError as error:
        problem = "" if isinstance(error, JsonError) else "is not JSON: "
        raise DataError(f"{origin}/{name} {problem}{error}; copy it again") from error
    if not isinstance(value, dict):
        raise DataError(f"{origin}/{name} is {shown(value)}, not an object; copy it again")
    return value


def read_settings(files: Files, origin: str) -> dict[str, Any]:
    """Returns tokenizer_config.json, with missing values from special_tokens_map.json."""
    config, special = (read_object(files, name, origin) for name in SETTINGS[:2])
    return special | {name: value for name, value in config.items() if value is not None}


def token_text(settings: Mapping[str, Any], name: str, default: str = "") -> str:
    """Returns the text of a token in the settings, such as eos_token."""
    value = settings.get(name, default)
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else default


class Generation(NamedTuple):
    """The special tokens of generation_config.json; see `Tokenizer`."""

    suppressed: tuple[int, ...]
    ends: tuple[int, ...]
    forced: tuple[int, ...]

    @classmethod
    def read(cls, files: Files, origin: str, vocab_size: int) -> "Generation":
        """Reads the file; ignores tokens that the model does not have."""
        data = read_object(files, SETTINGS[2], origin)

        def tokens(value: object) -> tuple[int, ...]:
            ids = value if isinstance(value, list) else [value]
            return tuple(sorted({i for i in ids if type(i) is int and 0 <= i < vocab_size}))

        words = data.get("bad_words_ids")
        words = (
            [word for word in words if isinstance(word, list)] if isinstance(words, list) else []
        )
        single = [word[0] for word in words if len(word) == 1]
        ends, forced = tokens(data.get("eos_token_id")), tokens(data.get("forced_bos_token_id"))
        suppressed = tokens([*single, *tokens(data.get("suppress_tokens"))])
        return cls(suppressed, ends if len(ends) > 1 else (), forced)


def clean_up(text: str) -> str:
    """Removes spaces before punctuation, as transformers does."""
    for spaced, plain in CLEAN_UP.items():
        text = text.replace(spaced, plain)
    return text


def choose_languages(
    tokenizer: Tokenizer, source: int | None, target: int | None, default: str
) -> tuple[int, int]:
    """Returns the tokens of both languages, by default those of the tokenizer's settings.

    `default` is the source language if the settings name none.
    """
    files, origin, codes = tokenizer.files, tokenizer.origin, tokenizer.target_languages
    settings = read_settings(files, origin)
    if source is None:
        source = codes.get(str(settings.get("src_lang")), codes.get(default))
    if target is None:
        forced = read_object(files, SETTINGS[2], origin).get("forced_bos_token_id")
        target = codes.get(str(settings.get("tgt_lang")), forced)
    for side, token in (("source", source), ("target", target)):
        if token not in codes.values():
            raise ConfigError(
                f"this model translates between {len(codes)} languages; set {side}_lang, such as "
                f"{max(codes)}"
            )
    assert source is not None
    assert target is not None
    return source, target


def threads_for(texts: Sequence[str], threads: int | None) -> int:
    """Returns how many threads sentencepiece uses, where -1 is one per core."""
    if threads is not None:
        return threads
    return -1 if len(texts) >= MIN_TEXTS_FOR_THREADS else 1


def _find_language(option: str, code: str | None, known: Mapping[str, int]) -> int | None:
    """Returns the token of a language code, which may be written like the token: >>deu<<."""
    if code is None:
        return None
    if not known:
        raise ConfigError(f"{option}={shown(code)}: this model has no such codes; leave it out")
    if code not in known and code.strip("<>_") not in known:
        raise ConfigError(f"{option}={shown(code)} is unknown; {_close_codes(code, known)}")
    return known.get(code, known.get(code.strip("<>_")))


def _close_codes(code: str, known: Iterable[str]) -> str:
    """Returns a hint with the codes most similar to an unknown one."""
    codes, start = sorted(known), code[:2].lower()
    close = [one for one in codes if one.startswith(start)] if start else []
    close += difflib.get_close_matches(code[:100], codes, n=5, cutoff=0.6)
    some = [*dict.fromkeys(close)][:8]
    if some:
        return f"close codes: {', '.join(map(shown, some))}"
    return one_line(f"choose from {', '.join(codes)}", 190)
