"""What the servers log: lines for people, or one JSON object a line for machines.

A record's own fields (`sandbox`, `exec`, `node`, `seconds`, `reason` and the like, given as `extra`) become keys of the
object. Commands, their output, variables and tokens are never logged.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any

from skyenv.errors import ConfigError

FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def _own_fields(record: logging.LogRecord) -> dict[str, Any]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD and value is not None}


class JsonLines(logging.Formatter):
    """One JSON object a line: `time` (UTC), `level`, `logger`, `message`, the record's own fields, `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        """See the class."""
        said: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_own_fields(record),
        }
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)
        return json.dumps(said, default=str)


class TextLines(logging.Formatter):
    """A line for people, the record's own fields after the message."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """See the class."""
        return " ".join(
            [super().formatMessage(record), *(f"{key}={value!r}" for key, value in _own_fields(record).items())]
        )


def log_to_stderr(form: str = "text", level: str = "info") -> None:
    """Show what this process logs. ConfigError for an unknown format or level."""
    if form not in FORMATS or level not in LEVELS:
        raise ConfigError(f"log format is one of {', '.join(FORMATS)}, log level one of {', '.join(LEVELS)}")
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.basicConfig(level=level.upper(), handlers=[handler])
