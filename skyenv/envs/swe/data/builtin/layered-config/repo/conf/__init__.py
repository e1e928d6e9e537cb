"""Layered configuration."""

from conf.loader import load

__all__ = ["load"]
