"""The `Engine`, which decodes text, and search functions that accept any step function."""

from writehead.data.outputs import Output, ScoredText
from writehead.engine.engine import Engine
from writehead.engine.search import Hypothesis
from writehead.engine.stepwise import beam_search, greedy, sample

__all__ = ["Engine", "Hypothesis", "Output", "ScoredText", "beam_search", "greedy", "sample"]
