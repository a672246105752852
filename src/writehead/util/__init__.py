"""Atomic files and locks, which know nothing of models."""
