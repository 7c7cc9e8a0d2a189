"""Lines of JSON for a server's log, in ASCII. No line holds a prompt or an answer."""

import json
import logging
import sys
import time
import traceback
from typing import Any

#: What the server logs: each record has its fields as ``fields``.
LOG = logging.getLogger("jetspec_jax.serve")


class JsonLines(logging.Formatter):
    """A record as one line."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        line |= getattr(record, "fields", {})
        if record.exc_info and record.exc_info[1] is not None:
            # Messages of errors may quote what was sent.
            error = record.exc_info[1]
            line["error"] = type(error).__name__
            line["where"] = [
                f"{own.filename}:{own.lineno}" for own in traceback.extract_tb(error.__traceback__)[-6:]
            ]
        # In ASCII: a path may hold what controls a terminal, or ends a line for other programs.
        return json.dumps(line)


def log(
    message: str, level: int = logging.INFO, *, error: BaseException | None = None, **fields: Any
) -> None:
    """Logs a message with fields."""
    LOG.log(level, message, exc_info=error, extra={"fields": fields})


def show_logs(uvicorn_level: int) -> None:
    """Writes this server's log, and uvicorn's from a level on, to standard output."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(JsonLines())
    for name, level in ((LOG.name, logging.INFO), ("uvicorn", uvicorn_level)):
        own = logging.getLogger(name)
        own.handlers = [handler]
        own.setLevel(level)
        own.propagate = False
