import pytest

from writehead.errors import BackendError, ConfigError
from writehead.ops.available import choose_implementation

REASONS = {"fast": "it needs a GPU", "library": None, "reference": None}


def test_auto_takes_the_first_implementation_that_can_run():
    assert choose_implementation("linear", "auto", REASONS) == "library"
    assert choose_implementation("linear", "reference", REASONS) == "reference"


def test_unknown_and_unavailable_implementations_are_explained():
    with pytest.raises(ConfigError, match=r"unknown .* linear 'libary'; did you mean 'library'"):
        choose_implementation("linear", "libary", REASONS)
    with pytest.raises(BackendError, match=r"'fast' .* linear: it needs a GPU; use 'auto'"):
        choose_implementation("linear", "fast", REASONS)
