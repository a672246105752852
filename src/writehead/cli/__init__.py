"""The command line: one verb a job, `--help` with an example for each."""

from writehead.cli import decode, demo, explain, prepare, train
from writehead.cli.app import app, main

__all__ = ["app", "decode", "demo", "explain", "main", "prepare", "train"]
