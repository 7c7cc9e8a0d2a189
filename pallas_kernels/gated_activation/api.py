"""The public operation: it checks its arguments and chooses an implementation.

Shapes: F features of the block.
"""

from jaxtyping import Array, Float

from pallas_kernels.activation import SILU, Activation
from pallas_kernels.checks import FLOATS, refuse, wrong_arrays
from pallas_kernels.differentiable import differentiable
from pallas_kernels.dispatch import Operation
from pallas_kernels.gated_activation import pallas_triton, reference

OPERATION = Operation.of(
    "gated_activation",
    reference.gated_activation,
    differentiable(pallas_triton.gated_activation, reference.gated_activation),
    pallas_triton.unsupported,
)
implementations = OPERATION.implementations


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
    wrong += wrong_arrays(("gate_up", gate_up, gate_up.shape, FLOATS))
    refuse("gated_activation", wrong)
    run = OPERATION.choose(implementation, gate_up)
    return run(gate_up, activation=activation)
