"""The server's log: ASCII lines of JSON, without prompts or answers."""

import json
import logging
import sys
import time
import traceback
from typing import Any

from jetspec_jax.arguments import shortened

#: The server's logger; each record has its fields in ``fields``.
LOG = logging.getLogger("jetspec_jax.serve")
# Most characters of a message and of a field: paths, methods and headers are as long as a client likes.
_MESSAGE, _FIELD = 1000, 200


class JsonLines(logging.Formatter):
    """Formats a record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "message": shortened(record.getMessage(), _MESSAGE),
        }
        for name, value in getattr(record, "fields", {}).items():
            line[name] = shortened(value, _FIELD) if isinstance(value, str) else value
        if record.exc_info and record.exc_info[1] is not None:
            # Without the error's message, which may quote the request.
            error = record.exc_info[1]
            line["error"] = type(error).__name__
            line["where"] = [
                f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)[-6:]
            ]
        # In ASCII, because a path may have characters that control a terminal or end a line.
        return json.dumps(line)


def log(
    message: str, level: int = logging.INFO, *, error: BaseException | None = None, **fields: Any
) -> None:
    """Logs a message with fields."""
    LOG.log(level, message, exc_info=error, extra={"fields": fields})


def show_logs(uvicorn_level: int) -> None:
    """Writes the server's log, and uvicorn's log from a level on, to standard output."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(JsonLines())
    for name, level in ((LOG.name, logging.INFO), ("uvicorn", uvicorn_level)):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(level)
        logger.propagate = False
