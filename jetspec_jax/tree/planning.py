"""An algorithm's plan, checked in all that is known without values, and so inside a compiled round too."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jetspec_jax.tree.algorithms import Algorithm, Plan, algorithm_of, name_of
from jetspec_jax.tree.candidates import Candidates, top_candidates
from jetspec_jax.tree.routing import Routing

#: What JAX raises where Python asks a traced array for its value.
_UNTRACEABLE = (jax.errors.JAXTypeError, jax.errors.JAXIndexError)


class Breadth(NamedTuple):
    """How broad trees may be.

    Attributes:
        width: Most children of a node.
        candidates: Tokens of a draft row that are looked at, no fewer. Where a row is the same for all nodes
            of its depth, no child is other than one of the best ``width``; with a selector, any may be.
    """

    width: int
    candidates: int


def breadth_of(
    algorithm: str | Algorithm, width: int | None, candidates: int | None, selected: int | None = None
) -> Breadth:
    """Width and candidates where either may be left open: then it is the other, or else the algorithm's own.

    Args:
        algorithm: The algorithm.
        width: Most children of a node; None leaves it open.
        candidates: Tokens of a draft row that are looked at; None leaves them open.
        selected: Among how many a selector chooses; None without one. Candidates that are left open are as
            many, and a width that is left open too is at most the algorithm's own.

    Raises:
        ValueError: The algorithm is none.
    """
    usual = algorithm_of(algorithm).usual_candidates
    if selected is not None and candidates is None:
        return Breadth(min(usual, selected) if width is None else width, selected)
    if candidates is None:
        candidates = usual if width is None else width
    return Breadth(candidates if width is None else width, candidates)


def check_breadth(breadth: Breadth, vocabulary: int) -> None:
    """Raises ValueError naming what of the breadth lies outside 1..V, or a width above the candidates."""
    for name, number in breadth._asdict().items():
        if not 1 <= number <= vocabulary:
            raise ValueError(f"{name} must lie in 1..{vocabulary}, not {number}")
    if breadth.width > breadth.candidates:
        raise ValueError(f"width must be at most candidates, {breadth.candidates}, not {breadth.width}")


def plan_of(algorithm: Algorithm, candidates: Candidates, routing: Routing) -> Plan:
    """The algorithm's plan for some candidates. Its checks are made while tracing and cost a program nothing.

    Raises:
        ValueError: The plan raised an error or cannot be traced, or it is no `Plan`, or a part of it has the
            wrong shape or type; all that is wrong is listed, after the algorithm's name.
    """
    try:
        plan = algorithm.plan(candidates, routing)
    except _UNTRACEABLE as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"tree algorithm {name_of(algorithm)!r}: plan must be traceable, without Python's if, int or "
            f"NumPy on values of arrays ({reason})"
        ) from error
    except Exception as error:
        # Built-in algorithms say by a ValueError what does not fit; anything else is a fault of the plan's.
        said = str(error) if type(error) is ValueError else f"plan raised {type(error).__name__}: {error}"
        raise ValueError(f"tree algorithm {name_of(algorithm)!r}: {said}") from error
    if wrong := _defects(plan, candidates.log_probs.shape[:2]):
        raise ValueError(f"tree algorithm {name_of(algorithm)!r}: {'; '.join(wrong)}")
    return plan


def check_traceable(algorithm: str | Algorithm, *, depth: int, width: int) -> None:
    """Traces the plan for one sequence, without computing anything.

    Args:
        algorithm: A name, or an algorithm with its options.
        depth: D, rows of the draft.
        width: W, most children of a node.

    Raises:
        ValueError: As `plan_of`, or the options do not go with the depth.
    """
    meant = algorithm_of(algorithm)

    def arrays(logits: Float[Array, "B D V"]) -> tuple[Any, Any]:
        plan = plan_of(meant, top_candidates(logits, width), Routing.unsaid(1))
        return plan.caps, plan.bonus

    # A vocabulary of the width is as good as any.
    jax.eval_shape(arrays, jax.ShapeDtypeStruct((1, depth, width), jnp.float32))


def _defects(plan: Any, shape: tuple[int, ...]) -> list[str]:
    """What is wrong with a plan whose values are unknown."""
    if not isinstance(plan, Plan):
        return [f"plan must return a Plan, not {type(plan).__name__}"]
    wrong = []
    for name, array, dtype in (("caps", plan.caps, jnp.int32), ("bonus", plan.bonus, jnp.float32)):
        if array is None and name == "bonus":
            continue
        expected = f"{jnp.dtype(dtype).name} {list(shape)}, one for each sequence and draft row"
        if not isinstance(array, jax.Array | np.ndarray):
            wrong.append(f"{name} must be {expected}, not {type(array).__name__}")
        elif array.shape != shape or array.dtype != dtype:
            wrong.append(f"{name} must be {expected}, not {array.dtype} {list(array.shape)}")
    if not isinstance(plan.weight, int | float) or not math.isfinite(plan.weight):
        wrong.append(f"weight must be a finite Python number, not {plan.weight!r}")
    elif plan.bonus is None and plan.weight != 1:
        wrong.append(f"weight {plan.weight!r} has no effect without a bonus")
    return wrong
