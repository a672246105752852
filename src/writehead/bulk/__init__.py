"""Bulk translation: many files, in shards, by one process, several processes or a cluster."""

from writehead.bulk.translator import BatchTranslator

__all__ = ["BatchTranslator"]
