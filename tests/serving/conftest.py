from collections.abc import Iterator

import httpx
import pytest

pytest.importorskip("fastapi")

from servers import client, models
from writehead.serving.models import Served


@pytest.fixture(scope="session")
def served() -> list[Served]:
    return models()


@pytest.fixture(scope="session")
def http(served: list[Served]) -> Iterator[httpx.Client]:
    with client(served) as made:
        yield made
