"""The command line: one verb a job, `--help` with an example for each."""

from writehead.cli import bench, decode, demo, explain, paper, prepare, quantize, train
from writehead.cli.app import app, main

__all__ = [
    "app",
    "bench",
    "decode",
    "demo",
    "explain",
    "main",
    "paper",
    "prepare",
    "quantize",
    "train",
]
