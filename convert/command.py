"""Conversion of checkpoints between Hugging Face safetensors and Orbax folders."""

import argparse
import re
import sys
from collections.abc import Sequence

from convert.conversion import STORED, Conversion, parse_dtype, to_huggingface, to_orbax
from convert.folders import Checkpoint, locate
from convert.quantizing import to_fp8
from convert.verification import Verification, check_target, verify
from jetspec_jax.checkpoint.tensor_plan import FILE_DTYPES
from jetspec_jax.checkpoint.writing import MAX_SHARD_BYTES
from jetspec_jax.cli.options import MODELS, add_target_option
from jetspec_jax.cli.parser import Parser

# The most names printed of tensors left out for one reason; the rest are counted.
MAX_NAMES = 3

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def main(argv: Sequence[str] | None = None) -> int:
    """Converts; returns the exit code: 1 if --verify finds a difference, 2 for an error."""
    arguments = _parser().parse_args(argv)
    try:
        return _run(arguments)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"convert: {error}", file=sys.stderr)
        return 2


def _parser() -> Parser:
    parser = Parser(
        prog="python -m convert",
        description="Converts a target or a draft head between Hugging Face safetensors and Orbax, and a "
        "target in GGUF to Hugging Face safetensors. SOURCE decides the direction. Parameters keep their "
        "bits, also in FP8; other quantised parameters are widened to float32, unless --dtype names "
        "another type.",
    )
    parser.add_argument(
        "source", metavar="SOURCE", help="Hugging Face folder, hub id, Orbax folder or GGUF file"
    )
    parser.add_argument("destination", metavar="DESTINATION", help="folder to write, which must not exist")
    parser.add_argument(
        "--quantize",
        choices=["fp8"],
        help="quantise SOURCE to a Hugging Face folder in FP8, in blocks of 128 x 128",
    )
    parser.add_argument(
        "--verify", action="store_true", help="read both checkpoints again, and compare bits and outputs"
    )
    add_target_option(parser, "with --verify: the target of the draft head")
    parser.add_argument(
        "--dtype",
        default=STORED,
        choices=[STORED, *map(str, FILE_DTYPES.values())],
        help="type of all parameters (default: stored, which keeps each type); config.json does not change",
    )
    parser.add_argument(
        "--max-shard-size",
        metavar="SIZE",
        help=f"largest safetensors file, like 500MB or 5GB (default: {MAX_SHARD_BYTES // 10**9}GB)",
    )
    MODELS.add(
        parser, ["ignore_config_keys", "allow_nonfinite"], ignore_config_keys=[], allow_nonfinite=False
    )
    return parser


def _run(arguments: argparse.Namespace) -> int:
    def found(place: str) -> Checkpoint:
        ignored, nonfinite = arguments.ignore_config_key, arguments.allow_nonfinite
        return locate(place, ignore_config_keys=ignored, allow_nonfinite=nonfinite)

    destination, target = arguments.destination, None
    # Checks everything that can be checked before weights are read.
    shard_bytes = None if arguments.max_shard_size is None else parse_size(arguments.max_shard_size)
    checkpoint = found(arguments.source)
    if arguments.target is not None:
        if not arguments.verify:
            raise ValueError("--model is used by --verify only")
        target = check_target(checkpoint, found(arguments.target))
    limit = MAX_SHARD_BYTES if shard_bytes is None else shard_bytes
    if arguments.quantize is not None:
        if arguments.verify:
            raise ValueError("--verify compares bits, and --quantize changes them: it reports its own error")
        done, error = to_fp8(checkpoint, destination, dtype=arguments.dtype, max_shard_bytes=limit)
        _report(done)
        print(
            f"quantised to FP8: the weights' error is {error.relative:.2%} (root mean square), at most "
            f"{error.worst_relative:.2%} in {error.worst}"
        )
        return 0
    if checkpoint.layout == "huggingface":
        if shard_bytes is not None:
            raise ValueError("--max-shard-size is about safetensors, and this writes an Orbax folder")
        done = to_orbax(checkpoint, destination, dtype=arguments.dtype)
    else:
        done = to_huggingface(
            checkpoint,
            destination,
            dtype=arguments.dtype,
            max_shard_bytes=limit,
        )
    _report(done)
    if not arguments.verify:
        return 0
    verified = verify(checkpoint, found(destination), target=target, dtype=arguments.dtype)
    _report_verification(verified, arguments.dtype)
    return 0 if verified.ok else 1


def parse_size(text: str) -> int:
    """Parses a size like ``500MB`` or ``5GB``, in powers of 1,000; raises ValueError for others and for 0."""
    match = re.fullmatch(r"(\d+)\s*([KMGT]?B|)", text.strip().upper())
    if match is None or not int(match[1]):
        raise ValueError(f"a size is a number of bytes, or one with KB, MB, GB or TB, not {text!r}")
    return int(match[1]) * (UNITS[match[2]] if match[2] != "B" else 1)


def _report(done: Conversion) -> None:
    layout = {"orbax": "an Orbax folder", "huggingface": "a Hugging Face folder"}[done.layout]
    print(
        f"{done.destination}: {layout} of the {done.kind}, {done.parameters} parameters, "
        f"{done.nbytes / 2**20:,.1f} MiB"
    )
    for reason, names in done.left_out.items():
        more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
        print(f"left out: {', '.join(names[:MAX_NAMES])}{more} ({reason})")


def _report_verification(found: Verification, dtype: str) -> None:
    rounded = "" if parse_dtype(dtype) is None else f", rounded to {dtype}"
    if found.differing:
        print(
            f"verify: {len(found.differing)} of {found.parameters} parameters differ{rounded}: "
            f"{', '.join(found.differing)}"
        )
    else:
        print(f"verify: all {found.parameters} parameters are equal, bit for bit{rounded}")
    if found.differing_files:
        print(f"verify: these files differ: {', '.join(found.differing_files)}")
    print(
        f"verify: {found.compared}: largest difference {found.largest_difference:.3g}, "
        f"relative {found.relative_difference:.3g}{'' if found.finite else ', and not all are finite'}"
    )
    print("verify: passed" if found.ok else "verify: FAILED")
