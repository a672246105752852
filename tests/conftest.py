"""What every test shares: one thread a worker, one seed a test, no GPU test without a GPU."""

import pytest
import torch
from hypothesis import settings

settings.register_profile("writehead", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("writehead")
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="there is no CUDA device"))


@pytest.fixture(autouse=True)
def _same_seed_for_every_test() -> None:
    torch.manual_seed(0)
