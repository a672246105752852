"""Text that ends at a stop string."""

from collections.abc import Sequence


class StopText:
    """A growing text; holds back what may be the beginning of a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.tokens: list[int] = []
        self.is_over = False  # a stop string has come

    def add(self, text: str, token: int | None = None) -> str:
        """Appends text and its token; returns the text that is certain to come before a stop."""
        if token is not None:
            self.tokens.append(token)
        self._held += text
        found = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if found:
            self.is_over = True
            self._held = self._held[: min(found)]
            return self.rest()
        kept = max((self._overlap(stop) for stop in self._stops), default=0)
        end = len(self._held) - kept
        new, self._held = self._held[:end], self._held[end:]
        return new

    def rest(self) -> str:
        """Returns what was held back, once no more text comes."""
        rest, self._held = self._held, ""
        return rest

    def _overlap(self, stop: str) -> int:
        """Returns how many characters at the end may begin a stop string."""
        most = min(len(stop) - 1, len(self._held))
        return next((n for n in range(most, 0, -1) if self._held.endswith(stop[:n])), 0)
