"""The algorithms of the reference implementation and of the JetSpec paper, and the optimal `TopNodes`.

Source: arXiv 2606.18394, and hao-ai-lab/JetSpec for names, options and defaults. Shapes: B sequences, D draft
depth, W width.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int, Int32

from jetspec_jax.tree.algorithms import Algorithm, Plan, register_algorithm
from jetspec_jax.tree.candidates import Candidates
from jetspec_jax.tree.profiles import NO_PROFILE, Profile
from jetspec_jax.tree.routing import (
    BALANCED,
    CLASSES,
    DECISIVE,
    UNCERTAIN,
    UNSAID,
    Routing,
    check_classes,
    hashable_hints,
)

#: The default algorithm of decoding.
DEFAULT_ALGORITHM = "top_nodes"

#: Caps by depth; the last cap also applies to all greater depths.
Template = tuple[int, ...]

_DECISIVE, _BALANCED, _UNCERTAIN = (1,), (3, 2, 1), (7, 7, 1)
_REASONING, _OPEN_ENDED = (1,), (2, 2, 1)


@register_algorithm("accum_logp")
@dataclass(frozen=True)
class AccumLogp(Algorithm):
    """JetSpec's algorithm: every expanded node gets the full width, 7 by default."""

    def plan(self, candidates: Candidates, routing: Routing) -> Plan:
        """The full width at every depth."""
        return Plan(_full(candidates))


@register_algorithm("top2gap_fanout")
@dataclass(frozen=True)
class Top2GapFanout(Algorithm):
    """Fewer children for more certain rows: ``round(W * sigmoid(-beta * (gap - g_0)))``, at least 1.

    The gap is the difference between the row's best and second-best log-probability. A width of 1 gives a
    chain.

    Attributes:
        beta: Slope of the caps.
        g_0: The gap at which caps are half the width.
    """

    beta: float = 1.0
    g_0: float = 1.0

    def plan(self, candidates: Candidates, routing: Routing) -> Plan:
        """Caps from the gap of each row."""
        width = candidates.tokens.shape[2]
        if width == 1:
            return Plan(_full(candidates))
        share = jax.nn.sigmoid(-self.beta * (_gaps(candidates) - self.g_0))
        return Plan(jnp.maximum(jnp.round(width * share).astype(jnp.int32), 1))


@register_algorithm("task_router")
@dataclass(frozen=True)
class TaskRouter(Algorithm):
    """A template of caps by the request's class: the caller's hint, or else inferred from the draft's gaps.

    Attributes:
        gap_high: A mean gap above this is decisive.
        gap_low: A mean gap below this is uncertain.
        templates: Caps by depth for some of `CLASSES`, as a mapping or pairs; other classes keep their
            default. The last cap also applies to greater depths. Templates with more caps than the draft has
            rows are refused when a tree is planned.
        force_baseline: Behave like `accum_logp`.
        routing: Hints about all sequences, a mapping with any of "task", "mode" and "text"; None is no hints.
    """

    gap_high: float = 2.0
    gap_low: float = 1.0
    templates: Any = None
    force_baseline: bool = False
    routing: Any = None

    def __post_init__(self) -> None:
        if not self.gap_low <= self.gap_high:
            raise ValueError(f"gap_low must be at most gap_high, {self.gap_high}, not {self.gap_low}")
        if self.templates is not None:
            object.__setattr__(self, "templates", _templates(self.templates))
        object.__setattr__(self, "routing", hashable_hints(self.routing))

    def plan(self, candidates: Candidates, routing: Routing) -> Plan:
        """The template of each sequence's class."""
        if self.force_baseline:
            return Plan(_full(candidates))
        templates = self._class_templates(candidates)
        caps = jnp.stack([_extended(templates[name], candidates) for name in CLASSES])
        return Plan(caps[self.classes(candidates, routing)])

    def classes(self, candidates: Candidates, routing: Routing) -> Int[Array, "B"]:
        """The class of each sequence."""
        gap = jnp.mean(_gaps(candidates), axis=1)
        inferred = jnp.where(
            gap > self.gap_high, DECISIVE, jnp.where(gap < self.gap_low, UNCERTAIN, BALANCED)
        )
        task_class = routing.or_all(self.routing).task_class
        return jnp.where(task_class == UNSAID, inferred, task_class)

    def _class_templates(self, candidates: Candidates) -> dict[str, Template]:
        """The caps by depth of each class."""
        given = dict(self.templates or ())
        for name, template in given.items():
            _check_fits(template, candidates, f"templates[{name!r}]")
        return dict(zip(CLASSES, (_DECISIVE, _BALANCED, _UNCERTAIN), strict=True)) | given


@register_algorithm("reasoning_router")
@dataclass(frozen=True)
class ReasoningRouter(Algorithm):
    """A chain for requests with reasoning, a few branches near the root for others.

    Attributes:
        gap_threshold: A mean gap above this counts as reasoning, whatever the hints say.
        open_ended_template: Caps by depth for other requests, at most as many as the draft has rows.
        force_baseline: Behave like `accum_logp`.
        routing: As in `TaskRouter`.
    """

    gap_threshold: float = 1.5
    open_ended_template: Sequence[int] = _OPEN_ENDED
    force_baseline: bool = False
    routing: Any = None

    def __post_init__(self) -> None:
        template = _template(self.open_ended_template, "open_ended_template")
        object.__setattr__(self, "open_ended_template", template)
        object.__setattr__(self, "routing", hashable_hints(self.routing))

    def plan(self, candidates: Candidates, routing: Routing) -> Plan:
        """A chain or the template for each sequence."""
        if self.force_baseline:
            return Plan(_full(candidates))
        inferred = jnp.mean(_gaps(candidates), axis=1) > self.gap_threshold
        reasons = routing.or_all(self.routing).reasoning | inferred
        if self.open_ended_template != _OPEN_ENDED:
            _check_fits(self.open_ended_template, candidates, "open_ended_template")
        caps = [_extended(template, candidates) for template in (self.open_ended_template, _REASONING)]
        return Plan(jnp.stack(caps)[reasons.astype(jnp.int32)])


@register_algorithm("class_histogram")
@dataclass(frozen=True)
class ClassHistogram(TaskRouter):
    """`task_router` with measured caps for the classes that the profile has.

    The profile may have more depths than the draft; the surplus is ignored.

    Attributes:
        profile: A profile with ``per_class_histograms``.
    """

    table: ClassVar[str | None] = "per_class_histograms"

    profile: Profile = NO_PROFILE

    def _class_templates(self, candidates: Candidates) -> dict[str, Template]:
        return super()._class_templates(candidates) | dict(self.profile.class_caps)


@register_algorithm("depth_rank_histogram")
@dataclass(frozen=True)
class DepthRankHistogram(Algorithm):
    """The number of children is the number of ranks accepted often enough at the depth.

    Depths that the profile lacks get the full width.

    Attributes:
        tau: The smallest acceptance of a rank that counts.
        profile: A profile with ``depth_rank_accept``.
    """

    table: ClassVar[str | None] = "depth_rank_accept"

    tau: float = 0.02
    profile: Profile = NO_PROFILE

    def plan(self, candidates: Candidates, routing: Routing) -> Plan:
        """Caps from the table, equal for all sequences."""
        batch, depth, width = candidates.tokens.shape
        rows = self.profile.depth_rank_accept[:depth]
        caps = [min(max(sum(share >= self.tau for share in row), 1), width) for row in rows]
        caps += [width] * (depth - len(caps))
        return Plan(jnp.broadcast_to(jnp.asarray(caps, jnp.int32)[None, :], (batch, depth)))


@register_algorithm("hybrid")
@dataclass(frozen=True)
class Hybrid(Algorithm):
    """The priority is the log-probability plus ``alpha`` times the sum of the path's row entropies.

    Attributes:
        alpha: Weight of the entropies, in nats.
    """

    alpha: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.alpha < math.inf:
            raise ValueError(f"alpha must be a number of at least 0, not {self.alpha}")

    def plan(self, candidates: Candidates, routing: Routing) -> Plan:
        """The full width, with entropies as a bonus."""
        return Plan(_full(candidates), self.alpha * candidates.entropies)


@register_algorithm("entropy")
@dataclass(frozen=True)
class Entropy(Algorithm):
    """The priority is the sum of entropies, the limit of `hybrid` for large ``alpha``; ties by age."""

    def plan(self, candidates: Candidates, routing: Routing) -> Plan:
        """The full width, with entropies as the only priority."""
        return Plan(_full(candidates), candidates.entropies, weight=0.0)


@register_algorithm("chain")
@dataclass(frozen=True)
class Chain(Algorithm):
    """The most probable token of each row: a tree of width 1."""

    def plan(self, candidates: Candidates, routing: Routing) -> Plan:
        """One child at every depth."""
        return Plan(jnp.ones_like(_full(candidates)))


@register_algorithm("top_nodes")
@dataclass(frozen=True)
class TopNodes(AccumLogp):
    """The most probable nodes within the budget, inserted one by one: optimal for the given scores."""

    one_by_one: ClassVar[bool] = True
    usual_candidates: ClassVar[int] = 32


def _full(candidates: Candidates) -> Int32[Array, "B D"]:
    batch, depth, width = candidates.tokens.shape
    return jnp.full((batch, depth), width, jnp.int32)


def _gaps(candidates: Candidates) -> Float32[Array, "B D"]:
    """The difference between the best and second-best log-probability of each row; 0 without a second."""
    best = candidates.log_probs
    return best[:, :, 0] - best[:, :, min(1, best.shape[2] - 1)]


def _check_fits(template: Sequence[int], candidates: Candidates, name: str) -> None:
    """Refuses a caller's template with more caps than the draft has rows; it was made for another draft."""
    depth = candidates.tokens.shape[1]
    if len(template) > depth:
        raise ValueError(
            f"{name} has {len(template)} caps, one for each depth, and the draft is {depth} deep; "
            f"give at most {depth}"
        )


def _extended(template: Sequence[int], candidates: Candidates) -> Int32[Array, "D"]:
    """Caps for all depths, clipped to 1..W."""
    _, depth, width = candidates.tokens.shape
    caps = [template[min(d, len(template) - 1)] for d in range(depth)]
    return jnp.asarray([min(max(cap, 1), width) for cap in caps], jnp.int32)


def _templates(given: Any) -> tuple[tuple[str, Template], ...]:
    """Templates as pairs sorted by class name."""
    pairs = tuple(given.items()) if isinstance(given, Mapping) else given
    if not isinstance(pairs, tuple) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise ValueError(f"templates must map classes to lists of caps, not {given!r}")
    names = [name for name, _ in pairs]
    check_classes(names, "templates")
    if len(set(names)) < len(names):
        raise ValueError(f"templates must name each class once, not {', '.join(names)}")
    return tuple(sorted((name, _template(caps, f"templates[{name!r}]")) for name, caps in pairs))


def _template(caps: Any, name: str) -> Template:
    valid = isinstance(caps, Sequence) and not isinstance(caps, str) and len(caps) > 0
    if not valid or not all(isinstance(cap, int) and not isinstance(cap, bool) and cap >= 1 for cap in caps):
        raise ValueError(f"{name} must be a list of caps of at least 1, one for each depth, not {caps!r}")
    return tuple(caps)
