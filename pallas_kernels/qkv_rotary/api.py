"""The public operation: it checks its arguments and chooses an implementation.

Shapes: B sequences, N nodes, G key/value heads, R query heads of each, E head size.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from pallas_kernels.checks import FLOATS, refuse, wrong_arrays
from pallas_kernels.differentiable import differentiable
from pallas_kernels.dispatch import Operation
from pallas_kernels.qkv_rotary import pallas_triton, reference

OPERATION = Operation.of(
    "qkv_rotary",
    reference.qkv_rotary,
    differentiable(pallas_triton.qkv_rotary, reference.qkv_rotary),
    pallas_triton.unsupported,
)
implementations = OPERATION.implementations


def qkv_rotary(
    qkv: Float[Array, "B N G heads E"],
    q_weight: Float[Array, "E"] | None,
    k_weight: Float[Array, "E"] | None,
    cos: Float32[Array, "B N half"],
    sin: Float32[Array, "B N half"],
    *,
    eps: float,
    weight_offset: float | None = None,
    norm_values: bool = False,
    implementation: str | None = None,
) -> tuple[Float[Array, "B N G R E"], Float[Array, "B N G E"], Float[Array, "B N G E"]]:
    """Split a fused projection, normalise the heads of queries and keys, and rotate them.

    In each of the G groups lie its R query heads, then its key, then its value, so heads = R + 2. R may be 0,
    where keys and values alone are wanted.

        qkv  [q q q q k v]  [q q q q k v]  ...

    What has a weight becomes `rms_norm(x, weight, eps=eps, weight_offset=weight_offset)` of that operation,
    rounded to the dtype of x. Rotary of queries and keys is half-split and in float32: with as many angles as
    `half`, element i < half pairs with element j = i + half,

        x[i], x[j]  ->  x[i] * cos[i] - x[j] * sin[i],  x[j] * cos[i] + x[i] * sin[i]

    and is rounded once. Elements after the first 2 * half are left as they are. Values are not rotated.
    (Rotary: Su et al., arXiv 2104.09864; half-split as in GPT-NeoX.)

    Args:
        qkv: in float32, bfloat16 or float16.
        q_weight: of any floating dtype; None leaves the queries as they are.
        k_weight: likewise for the keys.
        cos: cosines of each node's angles, half of them at most E / 2.
        sin: their sines.
        eps: of the norms; static.
        weight_offset: as in `rms_norm`, for both weights; static.
        norm_values: whether the values are normalised too, with no weight; static.
        implementation: one of `implementations()`; None picks the best for the case.

    Returns:
        (q, k, v), in the dtype of `qkv`.

    Raises:
        ValueError: an argument is misshapen or of the wrong dtype (all of them are listed), or
            there is no such implementation.
        NotImplementedError: the named implementation does not support the case or the device.
    """
    arrays = qkv, q_weight, k_weight, cos, sin
    if qkv.ndim != 5:
        raise ValueError(f"qkv_rotary: qkv must be [B, N, G, R + 2, E], got {qkv.shape}")
    batch, nodes, _, heads, size = qkv.shape
    half = cos.shape[-1] if cos.ndim else 0
    wrong = wrong_arrays(
        ("qkv", qkv, qkv.shape, FLOATS),
        ("q_weight", q_weight, (size,), jnp.floating),
        ("k_weight", k_weight, (size,), jnp.floating),
        ("cos", cos, (batch, nodes, half), jnp.float32),
        ("sin", sin, (batch, nodes, half), jnp.float32),
    )
    if heads < 2:
        wrong.append(f"qkv has {heads} heads in a group: no key or no value")
    if size % 2:
        wrong.append(f"heads of {size} elements do not split into halves")
    if not 1 <= half <= size // 2:
        wrong.append(f"cos has {half} angles; heads of {size} elements make 1 to {size // 2} pairs")
    refuse("qkv_rotary", wrong)
    run = OPERATION.choose(implementation, *arrays)
    return run(*arrays, eps=eps, weight_offset=weight_offset, norm_values=norm_values)
