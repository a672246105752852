import pytest

from texts import engine
from writehead.engine import Engine


@pytest.fixture(scope="module")
def translator() -> Engine:
    return engine("translation")


@pytest.fixture(scope="module")
def writer() -> Engine:
    return engine("language")
