"""Settings of JAX that hold for one thread, so that another one can compute for it."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax

# Those that decide where something is computed, how exactly, and with which types.
_SETTINGS: dict[str, Any] = {
    "jax_default_device": jax.default_device,
    "jax_default_matmul_precision": jax.default_matmul_precision,
    "jax_enable_x64": jax.enable_x64,
    "jax_numpy_dtype_promotion": jax.numpy_dtype_promotion,
    "jax_numpy_rank_promotion": jax.numpy_rank_promotion,
    "jax_debug_nans": jax.debug_nans,
}


def thread_config() -> tuple[Any, ...]:
    """The settings of this thread."""
    return tuple(getattr(jax.config, name) for name in _SETTINGS)


@contextlib.contextmanager
def configured(config: tuple[Any, ...]) -> Iterator[None]:
    """Computes with the settings of another thread."""
    with contextlib.ExitStack() as stack:
        for value, current, context in zip(config, thread_config(), _SETTINGS.values(), strict=True):
            if value != current:
                stack.enter_context(context(value))
        yield
