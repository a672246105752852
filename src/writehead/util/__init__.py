"""Atomic files, locks and CPU threads: tools that know nothing of models."""
