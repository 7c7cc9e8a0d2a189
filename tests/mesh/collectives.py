"""The order of the collectives of a program, as it is lowered."""

from bench.common.collectives import KINDS


def unordered(lowered):
    """Pairs of operations in one block, neighbours among those with collectives, of which the second would
    not wait for the first: XLA need not come to them in this order on every device.
    """
    module = lowered.compiler_ir("stablehlo")
    functions = {op.sym_name.value: op for op in module.body.operations}
    found = []

    def has_collectives(op):
        if op.operation.name in KINDS:
            return True
        if op.operation.name == "func.call":
            return has_collectives(functions[op.operation.attributes["callee"].value])
        return any(has_collectives(each) for block in blocks_of(op) for each in block)

    def visit(block):
        last, waiting = None, set()
        for op in block:
            waits = bool(reads(op) & waiting)
            if waits:
                waiting |= set(op.operation.results)
            if has_collectives(op):
                if last is not None and not waits:
                    found.append((str(last.name), str(op.operation.name)))
                last, waiting = op.operation, set(op.operation.results)
            if op.operation.name not in KINDS:
                for inner in blocks_of(op):
                    visit(inner)

    for function in functions.values():
        for block in blocks_of(function):
            visit(block)
    return found


def blocks_of(op):
    return [block for region in op.operation.regions for block in region]


def reads(op):
    """All values that an operation, or anything inside of it, reads."""
    inside = (reads(each) for block in blocks_of(op) for each in block)
    return set(op.operation.operands).union(*inside)
