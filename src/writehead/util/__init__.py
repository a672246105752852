"""Utilities that do not depend on models: atomic files, JSON, locks, CPU threads and extras."""
