"""The command line: one file per group of commands."""

from writehead.cli import bench, data, decode, demo, models, paper, train
from writehead.cli.app import app, main

__all__ = [
    "app",
    "bench",
    "data",
    "decode",
    "demo",
    "main",
    "models",
    "paper",
    "train",
]
