"""Tables of the parts of ``python -m bench load``, and notes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from bench.common.report import shown

Table = tuple[str, list[dict[str, Any]]]


def tables_of(parts: Mapping[str, Any]) -> Iterator[Table]:
    """A table per measured part."""
    for name, found in parts.items():
        title, table_of = PARTS[name]
        yield table_of(title, found["result"])


def _rows(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    return title, [{key: value for key, value in row.items() if key != "runs"} for row in rows]


def _quantiles(title: str, found: Mapping[str, Any]) -> Table:
    """A row per distribution."""
    about = ", ".join(f"{key} {shown(value)}" for key, value in found.items() if not isinstance(value, dict))
    rows = [{"what": key, **value} for key, value in found.items() if isinstance(value, dict)]
    return f"{title} ({about})", rows


def _traffic(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    table = [
        {
            "method": row["method"],
            "at a time": row["concurrency"],
            "a second": row["rate"],
            "tokens/s": row["tokens_per_second"],
            "tau": row["tau"],
            "first p50": row["first_token"]["p50_ms"],
            "first p90": row["first_token"]["p90_ms"],
            "gap p50": row["gaps"]["p50_ms"],
            "gap max": row["gaps"]["max_ms"],
            "dispatches": row["dispatches"],
            "host ms": row["host_ms"],
        }
        for row in rows
    ]
    return f"{title}; times in ms", table


#: The title of each part's table, and the function that makes the table.
PARTS: dict[str, tuple[str, Callable[[str, Any], Table]]] = {
    "prefill": ("prefill: prompt tokens per second", _rows),
    "ttft": ("time to first token of a short prompt beside decoding requests", _quantiles),
    "gaps": ("time between tokens of decoding requests, before and while a long prompt arrives", _quantiles),
    "shared": ("time to first token with a shared prefix", _quantiles),
    "host": ("the engine's thread, ms per dispatch", _rows),
    "traffic": ("methods in turn, random prompts", _traffic),
    "demo": ("methods in turn, real prompts", _traffic),
    "structured": ("decoding requests beside a request without and with a grammar", _rows),
}


def notes_of(parts: Mapping[str, Any]) -> list[str]:
    """What a reader of the tables must know."""
    if not {"host", "demo"} & parts.keys():
        return []
    return [
        "host_ms: scheduling, launching, fetching and delivering, without the wait for the device. On a "
        "CPU a launch may compute; thread_ms counts only the work of the engine's thread."
    ]
