"""The front door: two models side by side, trained, scored and timed in a few minutes on a CPU."""

from writehead.demo.run import run_demo

__all__ = ["run_demo"]
