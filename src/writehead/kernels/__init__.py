"""Attention itself: one `attend` over several backends, and what a query may see."""

from writehead.kernels.attend import BACKENDS, attend
from writehead.kernels.visibility import Visibility

__all__ = ["BACKENDS", "Visibility", "attend"]
