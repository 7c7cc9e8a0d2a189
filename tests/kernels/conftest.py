"""Fixtures of all kernels' tests."""

import jax
import jaxtyping
import pytest

from pallas_kernels.dispatch import Implementation


@pytest.fixture
def no_type_checks():
    """Calls as users make them: nothing but the operation itself looks at its arrays."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


@pytest.fixture
def stand_in(monkeypatch):
    """Puts an interpreted kernel into the place of an operation's `pallas_triton`.

    What is compiled meanwhile is compiled quickly: an interpreted kernel is a large program that runs once.
    """

    def replace(api, kernel):
        everything = Implementation(kernel, lambda *args, **kwargs: None)
        monkeypatch.setitem(api._IMPLEMENTATIONS, "pallas_triton", everything)

    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield replace
    jax.config.update("jax_disable_most_optimizations", before)
