"""The limits and options of a server."""

import re
from dataclasses import dataclass

from writehead.errors import ConfigError, shown
from writehead.schema import check_bounds, check_sizes, check_types

ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@]+")  # browsers send no path, nor a final slash
BEAM_LIMIT = 32  # the largest beam that a client may ask for


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a server accepts; it refuses more with a status that clients understand."""

    body_bytes: int = 1 << 20  # 413
    characters: int = 50_000  # of all texts of a request: 422
    queue: int = 1024  # sequences that wait for a slot: 429
    deadline: float = 60.0  # seconds per request: 504
    grace: int = 30  # seconds to finish requests after SIGTERM

    def __post_init__(self) -> None:
        check_types(self)
        check_sizes(self, "body_bytes", "characters", "queue")
        check_bounds(self, "deadline", gt=0)
        check_bounds(self, "grace", ge=0)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Limits, keys and what is logged; without keys, everyone may use the server."""

    limits: Limits = Limits()
    keys: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()  # of pages that may call the server (CORS)
    log_text: bool = False
    compare: str | None = None  # the model that races the first one on the page

    def __post_init__(self) -> None:
        if not all(key.strip() for key in self.keys):  # else, no key would be the right key
            raise ConfigError("an API key is empty; set one, or none to serve everyone")
        for one in self.origins:
            if one != "*" and not ORIGIN.fullmatch(one):
                raise ConfigError(f"{shown(one)} is not an origin such as https://example.org")
