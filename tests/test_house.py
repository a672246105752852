"""Imports go down the packages only, and the public names are documented."""

import ast
from pathlib import Path

import pytest

import writehead

SOURCE = Path(writehead.__file__).parent

# from the bottom up; a package may import itself and those before it
LOWER = "errors util schema config cost hugging_face_config kernels model data"
ROOMS = [
    *LOWER.split(),
    "decoding",
    "training",
    "interop",
    "bench",
    "paper",
    "explain",
    "demo",
    "cli",
]


def imports(path: Path) -> list[str]:
    """Modules of ours that a file imports, wherever in the file."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "writehead":
            found += [f"writehead.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.append(node.module or "")
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
    return [name for name in found if name.startswith("writehead.")]


FILES = [
    path for path in sorted(SOURCE.rglob("*.py")) if path.parent != SOURCE or path.stem in ROOMS
]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_down_the_rooms(path):
    room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    allowed = ROOMS[: ROOMS.index(room) + 1]
    for module in imports(path):
        name = module.split(".")[1]
        assert name in allowed or name == "__version__", f"{room} must not know {module}"


def test_the_listings_import_torch_only():
    path = SOURCE / "paper" / "listings.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert modules == {"torch"}


def test_every_public_name_can_be_had_and_is_documented():
    assert writehead.__all__ == dir(writehead)
    for name in writehead.__all__:
        assert getattr(writehead, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'attention'"):
        _ = writehead.attention
