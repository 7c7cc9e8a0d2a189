"""Summarises the answers of clients: a row per measurement, tables, and notes."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bench.serve.clients import Answer

#: The figures that can bound a good answer, in milliseconds.
BOUNDS = ("ttft", "tpot", "e2e")


def parse_bounds(words: Sequence[str]) -> dict[str, float]:
    """Bounds of a good answer, each NAME:MILLISECONDS.

    Raises:
        ValueError: A bound has another form.
    """
    bounds = {}
    for word in words:
        name, _, number = word.partition(":")
        try:
            bounds[name] = float(number)
        except ValueError:
            bounds[name] = -1.0
        if name not in BOUNDS or not bounds[name] > 0:
            raise ValueError(f"--goodput takes {', '.join(f'{bound}:MS' for bound in BOUNDS)}, not {word!r}")
    return bounds


def summed_up(answers: Sequence[Answer], seconds: float, bounds: Mapping[str, float]) -> dict[str, Any]:
    """The figures of a measurement.

    Args:
        answers: The answers to all requests.
        seconds: The duration of the measurement.
        bounds: The bounds of a good answer; without bounds every complete answer is good.

    Raises:
        RuntimeError: No answer is complete.
    """
    whole = [answer for answer in answers if answer.whole]
    refused = [answer for answer in answers if answer.status == 429]
    if not whole:
        reasons = {answer.error for answer in answers}
        raise RuntimeError(
            f"the server answered none of {len(answers)} requests: {'; '.join(map(str, reasons))}"
        )
    times = {
        "ttft": [1e3 * answer.first_token for answer in whole],
        "tpot": [1e3 * (answer.per_token or 0.0) for answer in whole],
        "e2e": [1e3 * answer.end_to_end for answer in whole],
    }
    good = [
        answer
        for place, answer in enumerate(whole)
        if all(times[name][place] <= most for name, most in bounds.items())
    ]
    tokens, prompts = (sum(getattr(answer, name) for answer in whole) for name in ("tokens", "prompt_tokens"))
    return {
        "requests": len(answers),
        "answered": len(whole),
        "refused": len(refused),
        "refused_with_retry_after": sum(answer.retry_after is not None for answer in refused),
        "failed": len(answers) - len(whole) - len(refused),
        "seconds": seconds,
        "requests_per_second": len(whole) / seconds,
        "tokens_per_second": tokens / seconds,
        "goodput_requests_per_second": len(good) / seconds,
        "goodput_tokens_per_second": sum(answer.tokens for answer in good) / seconds,
        "steady_goodput_tokens_per_second": steady(answers, good),
        **{name: quantiles(milliseconds) for name, milliseconds in times.items()},
        "prompt_tokens": prompts / len(whole),
        "output_tokens": tokens / len(whole),
        "cached_share": sum(answer.cached_tokens for answer in whole) / max(prompts, 1),
        "errors": sorted({str(answer.error) for answer in answers if answer.error and answer.status != 429})[
            :5
        ],
    }


def steady(answers: Sequence[Answer], good: Sequence[Answer]) -> float:
    """Tokens per second of the good answers that end in the steady state.

    The steady state starts when a fifth of the requests have been sent and ends with the last request. So
    neither filling nor draining the slots counts. 0 if all requests were sent at once.
    """
    sent = sorted(answer.due for answer in answers)
    start, end = sent[len(sent) // 5], sent[-1]
    tokens = sum(answer.tokens for answer in good if start < (answer.last or 0.0) <= end)
    return tokens / (end - start) if end > start else 0.0


def quantiles(milliseconds: Sequence[float]) -> dict[str, float]:
    """Median, 90th and 99th percentile, and maximum."""
    values = np.quantile(np.asarray(milliseconds), [0.5, 0.9, 0.99, 1.0]).tolist()
    return dict(zip(("p50_ms", "p90_ms", "p99_ms", "max_ms"), values, strict=True))


def tables_of(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Two tables: answers and throughput, and latency."""
    answered, times = [], []
    for row in rows:
        together, rate = row["concurrency"], row["rate"]
        arrivals = f"{rate:.1f}/s" if together is None else f"{together} at a time"
        scene = {"method": row["method"], "set": row["set"], "requests": arrivals}
        answered.append(
            {
                **scene,
                "answered": row["answered"],
                "429": row["refused"],
                "failed": row["failed"],
                "tokens/s": row["tokens_per_second"],
                "good/s": row["goodput_requests_per_second"],
                "cached": row["cached_share"],
            }
        )
        parts = ("p50", "p90", "p99")
        times.append(
            {**scene, **{f"{name} {part}": row[name][f"{part}_ms"] for name in BOUNDS for part in parts}}
        )
    return [("answers and throughput", answered), ("latency in ms", times)]


def notes_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The effect of overload."""
    notes = []
    for row in rows:
        if (row["load"] or 0) <= 1:
            continue
        others = [other for other in rows if _kind(other) == _kind(row) and (other["load"] or 0) <= 1]
        peak = max(other["steady_goodput_tokens_per_second"] for other in others)
        share = f"{row['steady_goodput_tokens_per_second'] / peak:.0%}" if peak else "unknown"
        bound = f" (bound {row['bound_seconds']:.2f} s)" if row["bound_seconds"] else ""
        notes.append(
            f"{row['method']}, {row['set']}, {row['load']:g} times the sustained rate: goodput "
            f"while requests arrive {share} of the peak; {row['refused']} of "
            f"{row['requests']} refused, {row['refused_with_retry_after']} with Retry-After, "
            f"{row['failed']} failed; p99 end to end of the others {row['e2e']['p99_ms'] / 1e3:.2f} s{bound}"
        )
    return notes


def _kind(row: Mapping[str, Any]) -> tuple[str, str]:
    return row["method"], row["set"]
