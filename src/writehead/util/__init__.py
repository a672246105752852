"""Utilities without knowledge of models: atomic files, JSON, locks, devices, threads, extras."""
