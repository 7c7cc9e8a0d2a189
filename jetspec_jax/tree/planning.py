"""Computes an algorithm's plan and checks its shapes and types, also inside a compiled round."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jetspec_jax.tree.algorithms import Algorithm, Plan, algorithm_of, name_of
from jetspec_jax.tree.candidates import Candidates, top_candidates
from jetspec_jax.tree.routing import Routing

#: JAX's errors for code that needs the value of a traced array.
_UNTRACEABLE = (jax.errors.JAXTypeError, jax.errors.JAXIndexError)


class Breadth(NamedTuple):
    """The breadth of trees.

    Attributes:
        width: Most children of a node.
        candidates: Number of candidates per draft row, at least ``width``. Without a selector only the best
            ``width`` can become children; with a selector, any candidate can.
    """

    width: int
    candidates: int


def breadth_of(
    algorithm: str | Algorithm, width: int | None, candidates: int | None, selected: int | None = None
) -> Breadth:
    """Resolves the defaults of width and candidates.

    If only one is given, the other equals it. If neither is, both are the algorithm's ``usual_candidates``.
    With a selector, candidates that are not given are more, see ``selected``.

    Args:
        algorithm: The algorithm.
        width: Most children of a node, or None.
        candidates: Number of candidates per draft row, or None.
        selected: Number of candidates that the head's selector was trained with; None without one. With one,
            the default width is the algorithm's ``usual_candidates``, and there are at least as many
            candidates as ``selected``, because each pair has its score.

    Raises:
        ValueError: The algorithm is unknown.
    """
    usual = algorithm_of(algorithm).usual_candidates
    if selected is not None and candidates is None:
        return Breadth(usual if width is None else width, max(usual, selected, width or 1))
    if candidates is None:
        candidates = usual if width is None else width
    return Breadth(candidates if width is None else width, candidates)


def check_breadth(breadth: Breadth, vocabulary: int) -> None:
    """Raises ValueError if width or candidates are outside 1..V, or the width exceeds the candidates."""
    for name, number in breadth._asdict().items():
        if not 1 <= number <= vocabulary:
            raise ValueError(f"{name} must lie in 1..{vocabulary}, not {number}")
    if breadth.width > breadth.candidates:
        raise ValueError(f"width must be at most candidates, {breadth.candidates}, not {breadth.width}")


def plan_of(algorithm: Algorithm, candidates: Candidates, routing: Routing) -> Plan:
    """The algorithm's plan for some candidates. It is checked during tracing, at no cost at run time.

    Raises:
        ValueError: `plan` raised an error, cannot be traced, does not return a `Plan`, or an array has the
            wrong shape or type. All problems are listed after the algorithm's name.
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
        # Built-in algorithms report unsuitable options with a ValueError; other errors are bugs of the plan.
        problem = str(error) if type(error) is ValueError else f"plan raised {type(error).__name__}: {error}"
        raise ValueError(f"tree algorithm {name_of(algorithm)!r}: {problem}") from error
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
        ValueError: As for `plan_of`, or the options do not fit the depth.
    """
    chosen = algorithm_of(algorithm)

    def arrays(logits: Float[Array, "B D V"]) -> tuple[Any, Any]:
        plan = plan_of(chosen, top_candidates(logits, width), Routing.unsaid(1))
        return plan.caps, plan.bonus

    # The size of the vocabulary does not matter, so it is the width.
    jax.eval_shape(arrays, jax.ShapeDtypeStruct((1, depth, width), jnp.float32))


def _defects(plan: Any, shape: tuple[int, ...]) -> list[str]:
    """Problems of a plan that can be found without its values."""
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
