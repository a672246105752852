"""Detects the language of texts, among those of the models."""

import threading
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from writehead.util.extras import requires


class Detected(NamedTuple):
    """A language, and the confidence in it, from 0 to 100."""

    language: str
    confidence: float


class Detector:
    """Ranks languages; `codes` are those that clients use, such as de or en_XX."""

    def __init__(self, codes: Collection[str]) -> None:
        self._codes, self._lock = codes, threading.Lock()
        self._identifier: Any = None  # loaded at the first call: 80 MB
        self._names: dict[str, str] = {}  # our codes, by its own

    def rank(self, texts: Sequence[str]) -> list[Detected]:
        """Ranks the languages of texts that share one, likeliest first; any thread may call it.

        If py3langid knows none of the codes, all of its languages are ranked.
        """
        with self._lock:
            self._identifier = self._identifier or self._load()
        ranked = self._identifier.rank("\n".join(texts))
        return [Detected(self._names.get(label, label), 100.0 * float(p)) for label, p in ranked]

    def _load(self) -> Any:
        with requires("serve"):
            from py3langid.langid import MODEL_FILE, LanguageIdentifier
        identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
        known = {*map(str, identifier.labels)}
        bases = {code.replace("-", "_").partition("_")[0]: code for code in self._codes}
        self._names = {base: code for base, code in bases.items() if base in known}
        if self._names:
            identifier.set_languages([*self._names])
        return identifier
