"""Imports go down the packages only, the public names are documented, and kernels are watched."""

import ast
from pathlib import Path

import pytest

import sanitize
import writehead
from helpers import KERNELS

SOURCE = Path(writehead.__file__).parent

# from the bottom up; a package may import itself and those before it
LOWER = "errors util schema config cost ops model data runs interop"
UPPER = "engine bulk training bench paper explain serving demo cli"
PACKAGES = [*LOWER.split(), *UPPER.split()]


def imports(path: Path) -> list[str]:
    """All writehead modules that a file imports, at any level."""
    modules = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "writehead":
            modules += [f"writehead.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            modules.append(node.module or "")
        elif isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
    return [name for name in modules if name.startswith("writehead.")]


FILES = [
    path for path in sorted(SOURCE.rglob("*.py")) if path.parent != SOURCE or path.stem in PACKAGES
]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_packages_import_only_lower_packages(path):
    package = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    allowed = PACKAGES[: PACKAGES.index(package) + 1]
    for module in imports(path):
        name = module.split(".")[1]
        assert name in allowed or name == "__version__", f"{package} must not import {module}"


def test_listings_import_only_torch():
    path = SOURCE / "paper" / "listings.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert modules == {"torch"}


def test_every_public_name_is_importable_and_documented():
    assert writehead.__all__ == dir(writehead)
    for name in writehead.__all__:
        assert getattr(writehead, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'attention'"):
        _ = writehead.attention


def test_every_launched_kernel_is_watched():
    assert set(sanitize.kernels()) >= KERNELS | {"_out_of_bounds_kernel", "_racing_kernel"}
