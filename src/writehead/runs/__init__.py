"""Runs: models on disk, with their tokenizers; full precision, quantized or bundled."""

from writehead.runs.folder import Run, load_run, read_config, save_run

__all__ = ["Run", "load_run", "read_config", "save_run"]
