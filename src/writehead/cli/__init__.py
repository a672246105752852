"""The command line: one file per group of commands."""

from writehead.cli import bench, convert, data, decode, demo, models, paper, train  # noqa: F401
from writehead.cli.app import app, main

__all__ = ["app", "main"]
