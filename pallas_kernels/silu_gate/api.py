"""The operation as a caller sees it: checks and the choice of an implementation.

Shapes: F features of the block.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.differentiable import differentiable
from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.silu_gate import pallas_triton, reference

_IMPLEMENTATIONS = {  # the preferred first
    "pallas_triton": Implementation(
        differentiable(pallas_triton.silu_gate, reference.silu_gate), pallas_triton.unsupported
    ),
    "xla": Implementation(reference.silu_gate, lambda *args: None),
}
_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def implementations() -> tuple[str, ...]:
    """Names that `silu_gate(implementation=...)` accepts, the preferred first."""
    return tuple(_IMPLEMENTATIONS)


def silu_gate(
    gate_up: Float[Array, "*rows 2 F"], *, implementation: str | None = None
) -> Float[Array, "*rows F"]:
    """The gate's SiLU times the other half: `silu(gate_up[..., 0, :]) * gate_up[..., 1, :]`.

    SiLU(x) = x / (1 + exp(-x)). All of it is float32 and rounded once, to the dtype of the input. (Gated
    blocks: Shazeer, arXiv 2002.05202.)

    Args:
        gate_up: the fused projection, the gate before the other half; in float32, bfloat16 or float16.
        implementation: one of `implementations()`; None picks the best for the case.

    Raises:
        ValueError: the argument is misshapen or of the wrong dtype (both are listed), or there is no such
            implementation.
        NotImplementedError: the named implementation does not support the case or the device.
    """
    wrong = []
    if gate_up.ndim < 2 or gate_up.shape[-2] != 2:
        wrong.append(f"gate_up is {gate_up.shape}, expected [..., 2, F]")
    if gate_up.dtype not in _DTYPES:
        wrong.append(
            f"gate_up holds {gate_up.dtype}, expected {', '.join(jnp.dtype(d).name for d in _DTYPES)}"
        )
    if wrong:
        raise ValueError("silu_gate: " + "; ".join(wrong))
    return choose("silu_gate", _IMPLEMENTATIONS, implementation, gate_up)(gate_up)
