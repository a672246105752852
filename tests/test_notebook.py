"""The notebook runs from top to bottom and prints the outputs stored in it."""

import contextlib
import io
import json
from pathlib import Path

import torch

NOTEBOOK = Path(__file__).parent.parent / "docs" / "from-listing-to-cache.ipynb"


def test_the_notebook_prints_its_stored_outputs():
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    names: dict[str, object] = {}
    dtype = torch.get_default_dtype()  # the notebook sets another
    try:
        for cell in cells:
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
            stored = "".join(text for output in cell["outputs"] for text in output["text"])
            assert printed.getvalue() == stored
    finally:
        torch.set_default_dtype(dtype)
