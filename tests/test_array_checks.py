"""Calls with arrays of a wrong shape are errors while tests run, whatever form the annotation has."""

import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from jaxtyping import Array, Float, TypeCheckError

from jetspec_jax.engine.pages import page_keys
from tests import array_checks

WRONG = jnp.zeros((2, 2))
checked = jaxtyping.jaxtyped(typechecker=array_checks.check)


@checked
def of_one(x: Float[Array, "n"]):
    return x


@checked
def of_several(x: dict[str, Float[Array, "n"] | None]):
    return x


@checked
def as_text(x: 'Float[Array, "n"]'):
    return x


@checked
def made(x) -> Float[Array, "n"]:
    return x


class Holder:
    @property
    @checked
    def value(self) -> Float[Array, "n"]:
        return WRONG


@pytest.mark.parametrize(
    "call",
    [
        lambda: of_one(WRONG),
        lambda: of_several({"x": WRONG}),
        lambda: as_text(WRONG),
        lambda: made(WRONG),
        lambda: Holder().value,
    ],
    ids=["one", "inside of others", "a text", "a result", "a property"],
)
def test_a_wrong_shape_is_an_error(call):
    with pytest.raises(TypeCheckError):
        call()


def test_functions_of_the_package_are_checked():
    with pytest.raises(TypeCheckError):
        page_keys(np.zeros((2, 64), np.int32))


def test_a_function_without_arrays_stays_as_it_is():
    def plain(x: int) -> str:
        return str(x)

    assert checked(plain) is plain
