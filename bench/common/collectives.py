"""The collectives of a lowered program: their number, their bytes, and the least time that they take."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

#: The kinds that programs have, by operation.
KINDS = {"stablehlo.all_reduce": "sum", "stablehlo.all_gather": "gather"}
_OTHERS = ("stablehlo.all_to_all", "stablehlo.collective_permute", "stablehlo.reduce_scatter")
# The function of `pallas_kernels.peer_sum`, which programs call by this name, or with a number after it.
_PEER_SUM = "peer_sum"
#: Bytes per second from one H100 or H200 to others by NVLink, as its data sheet says: 18 links of 25 GB/s.
LINK = 450e9
#: Seconds of one collective beside its bytes. An assumption: one-shot kernels of engines in CUDA sum 128 rows
#: of 4,096 in bfloat16 on two such devices in 6 us at best, of which the bytes take 2.3.
LATENCY = 3.7e-6


class Collective(NamedTuple):
    """A collective of a kind of `KINDS`, with the bytes of its result on a device.

    ``on_condition`` says whether it is in a branch of a condition, ``loops`` in how many nested loops it is.
    """

    kind: str
    bytes: int
    on_condition: bool
    loops: int


def collectives(lowered: jax.stages.Lowered) -> list[Collective]:
    """All collectives of a lowered program, sums by `peer_sum` included; those of a loop's body once.

    Raises:
        NotImplementedError: A collective is neither a sum nor a gather.
    """
    module: Any = lowered.compiler_ir("stablehlo")
    functions = {op.sym_name.value: op for op in module.body.operations}
    found = []

    def visit(op: Any, on_condition: bool, loops: int) -> None:
        name = op.operation.name
        callee = op.operation.attributes["callee"].value if name == "func.call" else ""
        if name in _OTHERS:
            raise NotImplementedError(f"{name} is not counted: only {', '.join(KINDS)} are")
        if name in KINDS or callee.startswith(_PEER_SUM):
            result = op.operation.results[0].type
            num_bytes = math.prod(result.shape) * max(8, result.element_type.width) // 8
            found.append(Collective(KINDS.get(name, "sum"), num_bytes, on_condition, loops))
            return  # its region says how two elements are added up
        if callee:
            visit(functions[callee], on_condition, loops)
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

    Bytes are the fewest that each must send. Of an element of a sum all partial values but one are sent to be
    added, and the result to all devices but one; of a gather each value to all but one.

    Args:
        found: The collectives of a program of rounds.
        devices: The devices that share its models.
        loops: How many loops a round stands in. Others, and conditions, run for an unknown number of times:
            their collectives count as ``varying``, and not in the floor.
    """
    always = [each for each in found if not each.on_condition and each.loops == loops]
    report: dict[str, Any] = {}
    for kind, times in (("sum", 2), ("gather", 1)):
        sizes = [each.bytes for each in always if each.kind == kind]
        report[f"{kind}s"] = {"count": len(sizes), "bytes": times * sum(sizes) * (devices - 1) // devices}
    seconds = len(always) * LATENCY + sum(part["bytes"] for part in report.values()) / LINK
    return {**report, "varying": len(found) - len(always), "floor_ms": 1e3 * seconds}
