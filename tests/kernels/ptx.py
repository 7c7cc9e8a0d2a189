"""What inline assembly of PTX computes, in NumPy: the few instructions that kernels here use."""

import re

import ml_dtypes
import numpy as np

BF16 = np.dtype(ml_dtypes.bfloat16)


def run(code, count, *inputs):
    """The 32-bit registers that the code leaves in its outputs."""
    registers = {f"${count + i}": np.asarray(own).view(np.uint32) for i, own in enumerate(inputs)}
    for line in code.splitlines():
        if match := re.fullmatch(r"([a-z]\S+) (\S+), (.*);", line):
            name, target, rest = match.groups()
            operands = [_operand(registers, word) for word in rest.split(", ")]
            registers[target] = _INSTRUCTIONS[name](*operands)
        else:
            assert re.fullmatch(r"[{}]|\.reg \.b32 .*;", line), line
    return [registers[f"${i}"] for i in range(count)]


def _operand(registers, word):
    return registers[word] if word in registers else np.uint32(int(word, 0))


def _prmt(a, b, selector):
    whole = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    out = np.zeros_like(a)
    for place in range(4):
        pick = int(selector) >> 4 * place & 15
        assert pick < 8, "sign replication"
        out |= ((whole >> np.uint64(8 * pick)) & np.uint64(0xFF)).astype(np.uint32) << np.uint32(8 * place)
    return out


def _lop3(a, b, c, table):
    assert table == 0xEA
    return (a & b) | c


def _halves(register):
    return [(register >> shift).astype(np.uint16).view(BF16).astype(np.float64) for shift in (0, 16)]


def _joined(low, high):
    low, high = (np.asarray(half, np.float64).astype(BF16).view(np.uint16) for half in (low, high))
    return low.astype(np.uint32) | high.astype(np.uint32) << np.uint32(16)


def _float(register):
    return np.asarray(register).view(np.float32)


_INSTRUCTIONS = {
    "prmt.b32": _prmt,
    "shr.u32": lambda a, by: a >> by,
    "shl.b32": lambda a, by: a << by,
    "and.b32": lambda a, b: a & b,
    "lop3.b32": _lop3,
    "mov.b32": np.asarray,
    "cvt.rn.bf16x2.f32": lambda high, low: _joined(_float(low), _float(high)),
    "sub.f32": lambda a, b: (_float(a) - _float(b)).view(np.uint32),
    "mul.bf16x2": lambda a, b: _joined(*(x * y for x, y in zip(_halves(a), _halves(b), strict=True))),
    "fma.rn.bf16x2": lambda a, b, c: _joined(
        *(x * y + z for x, y, z in zip(*map(_halves, (a, b, c)), strict=True))
    ),
}
