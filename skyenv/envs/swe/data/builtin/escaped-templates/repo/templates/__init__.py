"""Small text templates."""

from templates.render import render

__all__ = ["render"]
