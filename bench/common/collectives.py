"""What devices tell each other: the collectives of a program, as it is lowered, and the least time for them."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

#: The kinds that programs have, by operation.
KINDS = {"stablehlo.all_reduce": "sum", "stablehlo.all_gather": "gather"}
_OTHERS = ("stablehlo.all_to_all", "stablehlo.collective_permute", "stablehlo.reduce_scatter")
#: Bytes per second from one H100 or H200 to others by NVLink, as its data sheet says: 18 links of 25 GB/s.
LINK = 450e9
#: Seconds of one collective beside its bytes. An assumption: one-shot kernels of engines in CUDA sum 128 rows
#: of 4,096 in bfloat16 on two such devices in 6 us at best, of which the bytes take 2.3.
LATENCY = 3.7e-6


class Collective(NamedTuple):
    """One of them, each time that a program comes to it.

    Attributes:
        kind: One of `KINDS`.
        size: Elements of its result on a device.
        bytes: Bytes of that result.
        on_condition: Whether it stands in a branch of a condition.
        loops: How many loops it stands in.
    """

    kind: str
    size: int
    bytes: int
    on_condition: bool
    loops: int


def collectives(lowered: jax.stages.Lowered) -> list[Collective]:
    """All collectives of a lowered program; those of a loop's body once.

    Raises:
        NotImplementedError: A collective is neither a sum nor a gather.
    """
    module: Any = lowered.compiler_ir("stablehlo")
    functions = {op.sym_name.value: op for op in module.body.operations}
    found = []

    def visit(op: Any, on_condition: bool, loops: int) -> None:
        name = op.operation.name
        if name in _OTHERS:
            raise NotImplementedError(f"{name} is not counted: only {', '.join(KINDS)} are")
        if name in KINDS:
            result = op.operation.results[0].type
            size = math.prod(result.shape)
            num_bytes = size * max(8, result.element_type.width) // 8
            found.append(Collective(KINDS[name], size, num_bytes, on_condition, loops))
            return  # its region says how two elements are added up
        if name == "func.call":
            visit(functions[op.operation.attributes["callee"].value], on_condition, loops)
        on_condition |= name in ("stablehlo.case", "stablehlo.if")
        loops += name == "stablehlo.while"
        for region in op.operation.regions:
            for block in region:
                for each in block:
                    visit(each, on_condition, loops)

    visit(functions["main"], False, 0)
    return found


def exchanges(found: Sequence[Collective], devices: int, loops: int) -> dict[str, Any]:
    """What each device exchanges in a round, as a report keeps it.

    Bytes are the fewest that a device must send: each element of a sum is sent on once to be added and once
    as the result, by all devices but one, and each of a gather once. Switches that add are left out.

    Args:
        found: The collectives of a program of rounds.
        devices: The devices that share its models.
        loops: How many loops a round stands in. Others, and conditions, run for an unknown number of times:
            their collectives count as ``varying``, and not in the floor.
    """
    always = [own for own in found if not own.on_condition and own.loops == loops]
    report: dict[str, Any] = {}
    sent = 0
    for kind, times in (("sum", 2), ("gather", 1)):
        sizes = [own.bytes for own in always if own.kind == kind]
        num_bytes = times * sum(sizes) * (devices - 1) // devices
        report[f"{kind}s"] = {"count": len(sizes), "bytes": num_bytes}
        sent += num_bytes
    floor_ms = 1e3 * (len(always) * LATENCY + sent / LINK)
    return {**report, "varying": len(found) - len(always), "floor_ms": floor_ms}
