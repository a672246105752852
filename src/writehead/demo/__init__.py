"""The demo: trains a multi-head and a multi-query model, and compares them on one page."""

from writehead.demo.run import run_demo

__all__ = ["run_demo"]
