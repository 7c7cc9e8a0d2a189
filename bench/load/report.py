"""Tables of the parts of ``python -m bench load``, and notes."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Table = tuple[str, list[dict[str, Any]]]
#: The titles of the parts' tables.
TITLES = {
    "prefill": "prefill: prompt tokens per second",
    "ttft": "time to first token of a short prompt beside decoding requests",
    "gaps": "time between tokens of decoding requests, before and while a long prompt arrives",
    "shared": "time to first token with a shared prefix",
    "host": "the engine's thread, ms per dispatch",
    "traffic": "methods in turn, random prompts",
    "demo": "methods in turn, real prompts",
    "structured": "decoding requests beside a request without and with a grammar",
}


def tables_of(parts: Mapping[str, Any]) -> Iterator[Table]:
    """A table per measured part."""
    for name, found in parts.items():
        yield from _TABLES[name](TITLES[name], found["result"])


def _rows(title: str, rows: Sequence[Mapping[str, Any]]) -> Iterator[Table]:
    yield title, [{key: value for key, value in row.items() if key != "runs"} for row in rows]


def _quantiles(title: str, found: Mapping[str, Any]) -> Iterator[Table]:
    """A row per distribution."""
    about = ", ".join(f"{key} {_text(value)}" for key, value in found.items() if not isinstance(value, dict))
    rows = [{"what": key, **value} for key, value in found.items() if isinstance(value, dict)]
    yield f"{title} ({about})", rows


def _text(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _traffic(title: str, rows: Sequence[Mapping[str, Any]]) -> Iterator[Table]:
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
    yield f"{title}; times in ms", table


_TABLES: dict[str, Any] = {
    "prefill": _rows,
    "ttft": _quantiles,
    "gaps": _quantiles,
    "shared": _quantiles,
    "host": _rows,
    "traffic": _traffic,
    "demo": _traffic,
    "structured": _rows,
}


def notes_of(parts: Mapping[str, Any]) -> list[str]:
    """What a reader of the tables must know."""
    if not {"host", "demo"} & parts.keys():
        return []
    return [
        "host_ms: scheduling, launching, fetching and delivering, without the wait for the device. On a "
        "CPU a launch may compute; thread_ms counts only the work of the engine's thread."
    ]
