"""The command line: one file per group of commands."""

from writehead.cli import bench, data, decode, demo, models, paper, serve, train  # noqa: F401
from writehead.cli.app import app, main

__all__ = ["app", "main"]
