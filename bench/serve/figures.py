"""What clients saw, summed up: a row for each scene, its table, and notes."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bench.serve.clients import Answer

#: What a good answer may be bounded by, in milliseconds.
BOUNDS = ("ttft", "tpot", "e2e")


def parse_bounds(words: Sequence[str]) -> dict[str, float]:
    """Bounds of a good answer, each NAME:MILLISECONDS.

    Raises:
        ValueError: One is something else.
    """
    bounds = {}
    for word in words:
        name, _, number = word.partition(":")
        try:
            bounds[name] = float(number)
        except ValueError:
            bounds[name] = -1.0
        if name not in BOUNDS or not bounds[name] > 0:
            raise ValueError(f"--goodput takes {', '.join(f'{own}:MS' for own in BOUNDS)}, not {word!r}")
    return bounds


def summed_up(answers: Sequence[Answer], seconds: float, bounds: Mapping[str, float]) -> dict[str, Any]:
    """A scene's figures.

    Args:
        answers: Of all requests.
        seconds: That all took together.
        bounds: Of a good answer; none takes every whole one for good.

    Raises:
        RuntimeError: Nothing was answered.
    """
    whole = [own for own in answers if own.whole]
    refused = [own for own in answers if own.status == 429]
    if not whole:
        reasons = {own.error for own in answers}
        raise RuntimeError(
            f"the server answered none of {len(answers)} requests: {'; '.join(map(str, reasons))}"
        )
    times = {
        "ttft": [1e3 * own.first_token for own in whole],
        "tpot": [1e3 * (own.per_token or 0.0) for own in whole],
        "e2e": [1e3 * own.end_to_end for own in whole],
    }
    good = [
        own
        for place, own in enumerate(whole)
        if all(times[name][place] <= most for name, most in bounds.items())
    ]
    tokens, prompts = (sum(getattr(own, name) for own in whole) for name in ("tokens", "prompt_tokens"))
    return {
        "requests": len(answers),
        "answered": len(whole),
        "refused": len(refused),
        "refused_with_retry_after": sum(own.retry_after is not None for own in refused),
        "failed": len(answers) - len(whole) - len(refused),
        "seconds": seconds,
        "requests_per_second": len(whole) / seconds,
        "tokens_per_second": tokens / seconds,
        "goodput_requests_per_second": len(good) / seconds,
        "goodput_tokens_per_second": sum(own.tokens for own in good) / seconds,
        "steady_goodput_tokens_per_second": steady(answers, good),
        **{name: quantiles(own) for name, own in times.items()},
        "prompt_tokens": prompts / len(whole),
        "output_tokens": tokens / len(whole),
        "cached_share": sum(own.cached_tokens for own in whole) / max(prompts, 1),
        "events": sum(own.events for own in answers),
        "errors": sorted({str(own.error) for own in answers if own.error and own.status != 429})[:5],
    }


def steady(answers: Sequence[Answer], good: Sequence[Answer]) -> float:
    """Tokens a second of good answers that ended after the first fifth was sent and before the last was.

    So neither the filling of slots counts nor their running empty. 0 where so little was sent that it is
    one moment.
    """
    sent = sorted(own.due for own in answers)
    start, end = sent[len(sent) // 5], sent[-1]
    tokens = sum(own.tokens for own in good if start < (own.last or 0.0) <= end)
    return tokens / (end - start) if end > start else 0.0


def quantiles(milliseconds: Sequence[float]) -> dict[str, float]:
    """Median, 90th and 99th percentile, and the largest."""
    values = np.quantile(np.asarray(milliseconds), [0.5, 0.9, 0.99, 1.0]).tolist()
    return dict(zip(("p50_ms", "p90_ms", "p99_ms", "max_ms"), values, strict=True))


def tables_of(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Two tables: what was answered, and how long it took."""
    answered, times = [], []
    for row in rows:
        together, rate = row["concurrency"], row["rate"]
        comes = f"{rate:.1f}/s" if together is None else f"{together} at a time"
        scene = {"method": row["method"], "set": row["set"], "requests": comes}
        answered.append(
            {
                **scene,
                "answered": row["answered"],
                "429": row["refused"],
                "failed": row["failed"],
                "tokens/s": row["tokens_per_second"],
                "good/s": row["goodput_requests_per_second"],
                "cached": row["cached_share"],
                "cpu ms/event": row["server_ms_per_event"],
            }
        )
        parts = ("p50", "p90", "p99")
        times.append(
            {**scene, **{f"{name} {part}": row[name][f"{part}_ms"] for name in BOUNDS for part in parts}}
        )
    return [("a server, as its clients see it", answered), ("times in ms", times)]


def notes_of(rows: Sequence[Mapping[str, Any]], *, replays: bool) -> list[str]:
    """What one must know to read the table, and what overload did."""
    notes = []
    if replays:
        notes.append(
            "Replayed: the real scheduler, policy and HTTP over recorded rounds of one H200 and published "
            "acceptance (Qwen3-8B, greedy); nothing was computed, and rows that were not recorded lie on "
            "lines between those that were. cpu ms/event is the server's processor time without the "
            "engine's steps, all that a request costs included, by events of its streams."
        )
    for row in rows:
        if (row["load"] or 0) <= 1:
            continue
        others = [own for own in rows if _kind(own) == _kind(row) and (own["load"] or 0) <= 1]
        peak = max(own["steady_goodput_tokens_per_second"] for own in others)
        share = f"{row['steady_goodput_tokens_per_second'] / peak:.0%}" if peak else "unknown"
        bound = f" (bound {row['bound_seconds']:.2f} s)" if row["bound_seconds"] else ""
        notes.append(
            f"{row['method']}, {row['set']}, {row['load']:g} times the sustained rate: goodput "
            f"while requests come {share} of the peak; {row['refused']} of "
            f"{row['requests']} refused, {row['refused_with_retry_after']} with Retry-After, "
            f"{row['failed']} failed; p99 end to end of the others {row['e2e']['p99_ms'] / 1e3:.2f} s{bound}"
        )
    return notes


def _kind(row: Mapping[str, Any]) -> tuple[str, str]:
    return row["method"], row["set"]
