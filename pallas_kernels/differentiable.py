"""Gives kernels the derivatives of their references."""

import functools
from collections.abc import Callable
from typing import Any

import jax


def differentiable(kernel: Callable[..., Any], reference: Callable[..., Any]) -> Callable[..., Any]:
    """`kernel`, with the derivatives of `reference`: arrays by position, static settings by keyword.

    Only the arguments are kept for the backward pass, which computes `reference` again. Only reverse mode is
    supported: `jax.jvp` of the result raises a TypeError.
    """

    @functools.wraps(kernel)
    def call(*arrays: Any, **settings: Any) -> Any:
        run = jax.custom_vjp(functools.partial(kernel, **settings))

        def forward(*arrays: Any) -> tuple[Any, tuple[Any, ...]]:
            return kernel(*arrays, **settings), arrays

        def backward(arrays: tuple[Any, ...], cotangents: Any) -> tuple[Any, ...]:
            _, transpose = jax.vjp(functools.partial(reference, **settings), *arrays)
            return transpose(cotangents)

        run.defvjp(forward, backward)
        return run(*arrays)

    return call
