"""What rounding to float32 may change of a result: a bound that follows from the arithmetic.

In the standard model of floating-point arithmetic each operation returns its exact result times 1 + d, with
``|d| <= UNIT``. A reference computes in float64 and applies `Rounding` to every result that a float32 program
would round. It carries a leading axis of samples: the first stays exact, the others multiply each element by
its own random 1 + d. Their distance from the first is what single roundings amount to at the output, with the
condition of the function at these very inputs in it. A fixed tolerance knows nothing of that condition: the
norm behind a recurrence divides by the length of what is left of a state, and so magnifies rounding a
thousand times at some tokens and not at all at others.
"""

from typing import NamedTuple

import jax
import numpy as np

#: Half the distance of 1 from the next float32.
UNIT = 2.0**-24
SAMPLES = 8
#: How many root mean squares of the samples a float32 program may be off, whatever its order of summation.
#: The samples round a sum once. A sum of n terms is rounded up to n times, which comes to sqrt(n) roundings
#: (Higham and Mary, SIAM J. Sci. Comput. 41, 2019), and to sqrt(n / 4) where four lanes or more are added
#: side by side: 4 for the 64 terms of the tiny models' longest sums. A normal deviate exceeds three root
#: mean squares once in 400 times, and most sums are shorter.
FACTOR = 12


def exact(x):
    """In place of a `Rounding`: nothing is rounded, and there are no samples."""
    return x


class Rounding:
    """Multiplies each element of all samples but the first by a random 1 + d."""

    def __init__(self, seed=0):
        self._rng = np.random.default_rng(seed)

    def sampled(self, x):
        x = np.asarray(x, np.float64)
        return np.broadcast_to(x, (1 + SAMPLES, *x.shape))

    def __call__(self, x):
        rounded = np.array(x)
        rounded[1:] *= 1 + self._rng.uniform(-UNIT, UNIT, x[1:].shape)
        return rounded


def rounding_of(forward, weights, terms):
    """How far rounding may move each row of a float32 forward's results, where there is no reference.

    The computed product of n terms is the exact one of weights that are off by up to sqrt(n) roundings. So
    all weights are changed by that much, with random signs: four root mean squares of what that changes.
    """
    rng, here = np.random.default_rng(0), forward(weights)

    def changed(weight):
        signs = rng.choice(np.array([-1, 1], np.float32), weight.shape)
        return weight * (1 + np.float32(np.sqrt(terms) * UNIT) * signs)

    draws = [forward(jax.tree.map(changed, weights)) for _ in range(SAMPLES)]
    return [
        4 * np.sqrt(np.mean([np.abs(own - rows).max(axis=-1) ** 2 for own in others], axis=0))
        for rows, *others in zip(here, *draws, strict=True)
    ]


class Reference(NamedTuple):
    """What a float32 program should compute, ``values [..., V]``, and how far each row may be from it."""

    values: np.ndarray
    bound: np.ndarray


def reference_of(samples):
    """The exact values of samples, and their bound: a row's elements share what went before them."""
    apart = np.abs(samples[1:] - samples[0]).max(axis=-1)
    return Reference(samples[0], FACTOR * np.sqrt(np.mean(apart**2, axis=0)))


def assert_rounded(got, reference):
    """A float32 result is a reference's, but for rounding."""
    got, (values, bound) = np.asarray(got, np.float64), reference
    assert got.shape == values.shape
    assert values.std() > 0.1  # else it would mean nothing
    apart = np.abs(got - values).max(axis=-1)
    worst = np.unravel_index(np.argmax(apart / bound), apart.shape)
    assert (apart <= bound).all(), (
        f"{apart[worst]:.2e} from float64 at {worst}, {(apart / bound)[worst]:.1f} times the bound"
    )
