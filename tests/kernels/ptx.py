"""What inline assembly of PTX computes, in NumPy: the few instructions that kernels here use."""

import re

import jax
import ml_dtypes
import numpy as np
from jax._src.pallas.triton.primitives import elementwise_inline_asm_p
from jax.interpreters import mlir

BF16 = np.dtype(ml_dtypes.bfloat16)


def run(code, *inputs):
    """The 32-bit registers that the code leaves in its output."""
    registers = {f"${1 + i}": np.asarray(own).view(np.uint32) for i, own in enumerate(inputs)}
    for line in code.splitlines():
        if match := re.fullmatch(r"mov.b32 \{(\w+), \w+\}, (\w+);", line):
            registers[match[1]] = registers[match[2]] & np.uint32(0xFFFF)
        elif match := re.fullmatch(r"([a-z]\S+) (\S+), (.*);", line):
            name, target, rest = match.groups()
            operands = [_operand(registers, word) for word in rest.split(", ")]
            registers[target] = _INSTRUCTIONS[name](*operands)
        else:
            assert re.fullmatch(r"[{}]|\.reg \.b(32|16) .*;", line), line
    return registers["$0"]


def interpret():
    """Lets interpreted Triton kernels have inline assembly, on CPUs."""

    def computed(*args, asm, pack, result_shape_dtypes, **_):
        [like] = result_shape_dtypes

        def call(*inputs):
            # Any elements may share an instance of the code.
            words = [np.ravel(array).view(np.uint32) for array in inputs]
            counts = [pack * array.itemsize // 4 for array in inputs]
            registers = (
                word[i::count] for word, count in zip(words, counts, strict=True) for i in range(count)
            )
            return [run(asm, *registers).view(like.dtype).reshape(like.shape)]

        return jax.pure_callback(call, [like], *args)

    mlir.register_lowering(elementwise_inline_asm_p, mlir.lower_fun(computed, multiple_results=True), "cpu")


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


def _halves(register):
    return [_wide(np.asarray(register >> shift).astype(np.uint16)) for shift in (0, 16)]


def _wide(bits):
    """bfloat16 in float64, by integers: on threads of XLA:CPU subnormal numbers are zero."""
    exponent, mantissa = (bits >> 7 & 255).astype(np.int32), (bits & 127).astype(np.int32)
    magnitude = np.ldexp((mantissa + 128 * (exponent > 0)).astype(np.float64), np.maximum(exponent, 1) - 134)
    return np.where(exponent == 255, np.where(mantissa, np.nan, np.inf), magnitude) * np.where(
        bits >> 15, -1.0, 1.0
    )


def _joined(low, high):
    low, high = (np.asarray(half, np.float64).astype(BF16).view(np.uint16) for half in (low, high))
    return low.astype(np.uint32) | high.astype(np.uint32) << np.uint32(16)


_INSTRUCTIONS = {
    "prmt.b32": _prmt,
    "shr.u32": lambda a, by: a >> by,
    "mul.lo.u32": lambda a, b: a * b,
    "cvt.rn.f16x2.e4m3x2": lambda a: (
        np.stack([a & 0xFF, a >> 8], axis=-1)
        .astype(np.uint8)
        .view(ml_dtypes.float8_e4m3fn)
        .astype(np.float16)
    ).view(np.uint32)[..., 0],
    "and.b32": lambda a, b: a & b,
    "mov.b32": np.asarray,
    "fma.rn.bf16x2": lambda a, b, c: _joined(
        *(x * y + z for x, y, z in zip(*map(_halves, (a, b, c)), strict=True))
    ),
}
