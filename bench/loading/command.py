"""``python -m bench loading``: seconds and memory that a checkpoint takes from files to devices.

It writes a target of a named shape, all of its values the same, or takes one that is there, and reads it in a
process of its own. What was just written is in the system's memory still, as far as there is room: ``--cold``
asks the system to let go of it first. Reading the files without making anything of them is the floor.
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
    add("--shape", help=f"what is written: {', '.join(CONFIGS)} (default: qwen3-0.6b)")
    add("--work", type=Path, help="folder to write it into (default: a new one for temporary files)")
    add_switch(parser, "--keep", "do not delete it at the end")
    MODELS.add(
        parser, ["target", "dtype", "ignore_config_keys", *PARALLEL[:-1]], dtype="auto", ignore_config_keys=[]
    )
    add_switch(parser, "--cold", "ask the system to forget the files before they are read")
    add_switch(parser, "--profile", "also list the functions that take longest, which slows them down")
    add_report_arguments(parser, "loading", picture=False)


def run(arguments: argparse.Namespace) -> int:
    """Writes, reads, prints the table, and writes the JSON."""
    if arguments.target is not None and (arguments.shape or arguments.work or arguments.keep):
        raise ValueError("--model is read as it is: it goes with neither --shape, --work nor --keep")
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
    """Writes a target whose values are all one number; the host holds a file's tensors at a time.

    Raises:
        OSError: There is no room for it.
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
    """Puts files on the disk, and asks the system to keep none of them in memory."""
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
        # Of this process, which has left the devices alone until now.
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
        tables.insert(0, ("functions by their own time, slowed down by the profiler", found["profile"]))
    publish(arguments, report, tables, _notes(report))
    return 0


def _title(report: Mapping[str, Any]) -> str:
    name = report["arguments"]["shape"] or report["arguments"]["target"]
    return f"loading {name} ({report['files']} files), {measured_on(report)}"


def _row(report: Mapping[str, Any]) -> dict[str, Any]:
    def gib(value: int | None) -> float | None:
        return None if value is None else value / 2**30

    peaks = [own["peak"] for own in report["memory_of_devices"]]
    return {
        "GB": report["file_bytes"] / 1e9,
        "written s": report.get("write_seconds"),
        "loaded s": report["load_seconds"],
        "GB/s": report["bytes_per_second"] / 1e9,
        "read again GB/s": report["file_bytes"] / report["read_again_seconds"] / 1e9,
        "host GiB": gib(report["peak_host_bytes"]["anonymous"]),
        "with files GiB": gib(report["peak_host_bytes"]["resident"]),
        "weights GiB": gib(max(own["weights"] for own in report["memory_of_devices"])),
        "peak GiB": gib(max(filter(None, peaks), default=None)),
    }


def _notes(report: Mapping[str, Any]) -> list[str]:
    pages = {
        "just written": "The files were just written: as far as memory holds them, no disk was read.",
        "as it was": "Nobody knows what of the files was in memory before.",
        "asked to be forgotten": "The system was asked to forget the files before they were read.",
    }
    return [
        pages[report["pages_of_files"]],
        "Memory of the host is what came on top while loading, once without the pages of files and once with "
        "them; of the devices that of the fullest, its weights and its peak.",
    ]
