"""The operation as a caller sees it: checks and the choice of an implementation.

Shapes: F features of the block.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.activation import SILU, Activation
from pallas_kernels.differentiable import differentiable
from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.gated_activation import pallas_triton, reference

_IMPLEMENTATIONS = {  # the preferred first
    "pallas_triton": Implementation(
        differentiable(pallas_triton.gated_activation, reference.gated_activation), pallas_triton.unsupported
    ),
    "xla": Implementation(reference.gated_activation, lambda *args: None),
}
_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def implementations() -> tuple[str, ...]:
    """Names that `gated_activation(implementation=...)` accepts, the preferred first."""
    return tuple(_IMPLEMENTATIONS)


def gated_activation(
    gate_up: Float[Array, "*rows 2 F"], *, activation: Activation = SILU, implementation: str | None = None
) -> Float[Array, "*rows F"]:
    """What a gated block makes of its halves: `activation(gate_up[..., 0, :], gate_up[..., 1, :])`.

    All of it is float32 and rounded once, to the dtype of the input.

    Args:
        gate_up: the fused projection, the gate before the other half; in float32, bfloat16 or float16.
        activation: the formula.
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
        raise ValueError("gated_activation: " + "; ".join(wrong))
    run = choose("gated_activation", _IMPLEMENTATIONS, implementation, gate_up)
    return run(gate_up, activation=activation)
