"""A calculator for one line of text."""

from calc.parser import evaluate

__all__ = ["evaluate"]
