"""The command line: one file per group of commands."""

from writehead.cli import (  # noqa: F401
    bench,
    convert,
    data,
    decode,
    demo,
    interop,
    models,
    paper,
    serve,
    train,
)
from writehead.cli.app import app, main

__all__ = ["app", "main"]
