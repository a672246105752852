"""Searches over a step function, and the engine that decodes text."""

from writehead.decoding.batching import Batching
from writehead.decoding.beam import beam_search
from writehead.decoding.engine import Engine, Output, ScoredText
from writehead.decoding.search import Hypothesis, greedy, sample

__all__ = [
    "Batching",
    "Engine",
    "Hypothesis",
    "Output",
    "ScoredText",
    "beam_search",
    "greedy",
    "sample",
]
