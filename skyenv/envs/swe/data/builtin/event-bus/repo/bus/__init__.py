"""Events by name."""

from bus.bus import Bus

__all__ = ["Bus"]
