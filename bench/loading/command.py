"""``python -m bench loading``: seconds and memory to load a checkpoint from files to devices.

The command writes a target of a named shape, with equal values, or uses an existing one (``--model``), and
loads it in a separate process. Files just written may still be in the page cache; ``--cold`` asks the system
to drop them first. The floor is reading the files without using them.
"""

import argparse
import math
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from flax import nnx

from bench.common.options import add_switch, check_known
from bench.common.report import add_report_arguments, check_report, measured_on, opening_of, publish
from bench.common.shapes import CONFIGS
from bench.loading.measure import Job, in_fresh_process, read_plainly
from jetspec_jax.checkpoint.source import Source
from jetspec_jax.checkpoint.unread import Unread
from jetspec_jax.checkpoint.writing import save_checkpoint
from jetspec_jax.cli.options import MODELS, PARALLEL, parallel_sizes
from jetspec_jax.config import parse_config
from jetspec_jax.models import abstract, weights_of

VALUE = np.asarray(0.02, ml_dtypes.bfloat16)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    add = parser.add_argument
    add("--shape", help=f"shape of the written target: {', '.join(CONFIGS)} (default: qwen3-0.6b)")
    add("--work", type=Path, help="folder for the written target (default: a new temporary folder)")
    add_switch(parser, "--keep", "keep the written target")
    MODELS.add(
        parser, ["target", "dtype", "ignore_config_keys", *PARALLEL[:-1]], dtype="auto", ignore_config_keys=[]
    )
    add_switch(parser, "--cold", "ask the system to drop the files from the page cache first")
    add_switch(parser, "--profile", "also profile the loading thread, which slows it down")
    add_report_arguments(parser, "loading", picture=False)


def run(arguments: argparse.Namespace) -> int:
    """Writes and loads a target, prints the table, and writes the JSON."""
    if arguments.target is not None and (arguments.shape or arguments.work or arguments.keep):
        raise ValueError("--model names an existing target: it goes with neither --shape, --work nor --keep")
    check_report(arguments)
    if arguments.target is not None:
        return _report(arguments, Source(arguments.target).folder, {})
    arguments.shape = arguments.shape or "qwen3-0.6b"
    check_known("shape", [arguments.shape], CONFIGS)
    if arguments.work is not None:
        arguments.work.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="loading-", dir=arguments.work))
    try:
        folder = work / arguments.shape
        started = time.perf_counter()
        write_target(folder, CONFIGS[arguments.shape])
        return _report(arguments, folder, {"write_seconds": time.perf_counter() - started})
    finally:
        if arguments.keep:
            print(f"kept {work}")
        else:
            shutil.rmtree(work)


def write_target(folder: Path, raw: Mapping[str, Any]) -> None:
    """Writes a target with equal values; memory holds the tensors of one file at a time.

    Raises:
        OSError: There is not enough room on the disk.
    """
    config = parse_config(raw)
    shapes = nnx.traversals.flatten_mapping(weights_of(abstract(config)))
    sizes = [math.prod(leaf.shape) * VALUE.itemsize for leaf in shapes.values()]
    if sum(sizes) > (free := shutil.disk_usage(folder.parent).free):
        raise OSError(f"{folder} needs {sum(sizes):,} bytes, and {free:,} are free; name another --work")
    weights = {
        path: Unread(leaf.shape, VALUE.dtype, lambda leaf=leaf: np.broadcast_to(VALUE, leaf.shape))
        for path, leaf in shapes.items()
    }
    save_checkpoint(folder, raw, nnx.traversals.unflatten_mapping(weights), config=config)


def forget(folder: Path) -> None:
    """Flushes files to the disk, and asks the system to drop them from the page cache."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _report(arguments: argparse.Namespace, folder: Path, written: dict[str, Any]) -> int:
    sizes, ignored = parallel_sizes(arguments), tuple(arguments.ignore_config_key)
    tensor, expert = (sizes.get(field, 1) for field in PARALLEL[:-1])
    cache = "just written" if written else "as it was"
    if arguments.cold:
        forget(folder)
        cache = "asked to be forgotten"
    found = in_fresh_process(
        Job(folder, arguments.dtype, (tensor, expert) if sizes else None, ignored, arguments.profile)
    )
    files = sorted(folder.glob("*.safetensors"))
    num_bytes = sum(path.stat().st_size for path in files)
    report = {
        # Initialises JAX's devices in this process, after the loading process has ended.
        **opening_of("loading", arguments),
        "devices": len(found["devices"]),
        "dtype": found["dtype"],
        "files": len(files),
        "file_bytes": num_bytes,
        "pages_of_files": cache,
        **written,
        "load_seconds": found["seconds"],
        "bytes_per_second": num_bytes / found["seconds"],
        "read_again_seconds": read_plainly(folder),
        "peak_host_bytes": found["host"],
        "memory_of_devices": found["devices"],
        "profile": found["profile"],
    }
    tables = [(_title(report), [_row(report)])]
    if found["profile"]:
        tables.insert(0, ("functions by self time, slowed down by the profiler", found["profile"]))
    publish(arguments, report, tables, _notes(report))
    return 0


def _title(report: Mapping[str, Any]) -> str:
    name = report["arguments"]["shape"] or report["arguments"]["target"]
    return f"loading {name} ({report['files']} files), {measured_on(report)}"


def _row(report: Mapping[str, Any]) -> dict[str, Any]:
    def gib(value: int | None) -> float | None:
        return None if value is None else value / 2**30

    peaks = [device["peak"] for device in report["memory_of_devices"]]
    return {
        "GB": report["file_bytes"] / 1e9,
        "written s": report.get("write_seconds"),
        "loaded s": report["load_seconds"],
        "GB/s": report["bytes_per_second"] / 1e9,
        "read again GB/s": report["file_bytes"] / report["read_again_seconds"] / 1e9,
        "host GiB": gib(report["peak_host_bytes"]["anonymous"]),
        "with files GiB": gib(report["peak_host_bytes"]["resident"]),
        "weights GiB": gib(max(device["weights"] for device in report["memory_of_devices"])),
        "peak GiB": gib(max(filter(None, peaks), default=None)),
    }


def _notes(report: Mapping[str, Any]) -> list[str]:
    pages = {
        "just written": "The files were just written, so they may have been read from the page cache.",
        "as it was": "It is unknown how much of the files was in the page cache.",
        "asked to be forgotten": "The system was asked to drop the files from the page cache first.",
    }
    return [
        pages[report["pages_of_files"]],
        "Host memory is the peak increase while loading, without and with mapped files. Device memory is the "
        "fullest device's: its weights and its peak.",
    ]
