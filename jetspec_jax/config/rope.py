"""The rotary embedding of a config, in the older dialect (``rope_theta``, ``rope_scaling``) or the newer one.

The newer one has ``rope_parameters``: one object, or one for each type of layer.
"""

import math
from collections.abc import Collection, Mapping
from typing import Any

from jetspec_jax.config.fields import MAX_TOKENS, Fields
from jetspec_jax.config.geometry import Linear, Llama3, Rope, Scaling, Yarn

FULL, SLIDING = "full_attention", "sliding_attention"
#: The rope types of the Qwen3 families.
QWEN3_TYPES = ("default", "yarn")
#: Those of Llama and Mistral, and the base of their files that name none, as all readers have it.
LLAMA_TYPES = ("default", "linear", "llama3", "yarn")
LLAMA_THETA = 10000.0


def read_rope(
    fields: Fields,
    head_dim: int,
    types: Collection[str] = ("default",),
    *,
    theta: float | None = None,
    share: float | None = None,
    inert: Collection[str] = (),
) -> Rope:
    """The one rotary embedding of a model, from either dialect or both.

    A file without a base is refused, unless all readers of the family give it the same.

    Args:
        fields: The config.
        head_dim: Elements of a head.
        types: The rope types that the family may have.
        theta: The base of a file that has none.
        share: The part of a head that turns by a file that does not say; None: all of it turns, in any file.
        inert: Settings of the family that have no effect on text.

    Raises:
        ValueError: The type or a setting is not supported, or there is no base, or there are two of it or of
            the turning part.
    """
    bases = {fields.positive("rope_theta")} if "rope_theta" in fields else set()
    found = []
    for name in ("rope_parameters", "rope_scaling"):
        if (own := fields.object(name)) is not None:
            if "rope_theta" in own:
                bases.add(own.positive("rope_theta"))
            own.inert(*inert)
            found.append((own, _kind(own, types)))
    if not bases and theta is not None:
        bases = {theta}
    if not bases:
        raise ValueError(f"{fields.where}: neither rope_theta nor rope_parameters.rope_theta is there")
    if len(bases) > 1:
        raise ValueError(f"{fields.where}: rope_theta is given twice and differs: {sorted(bases)}")
    (theta,) = bases
    found = found or [(Fields({}, f"{fields.where}: rope_parameters"), "default")]
    if share is not None:
        _assume_share(fields, [own for own, _ in found], share)
    partial = share is not None
    ropes = {_rope(own, kind, head_dim, theta, partial=partial) for own, kind in found}
    if len(ropes) > 1:
        raise ValueError(f"{fields.where}: rope_parameters and rope_scaling mean the same and differ")
    return ropes.pop()


def read_layer_ropes(
    fields: Fields,
    head_dims: Mapping[str, int],
    types: Collection[str],
    *,
    partial: bool = False,
) -> dict[str, Rope]:
    """The rotary embedding of each type of layer, from the objects of the newer dialect.

    Args:
        fields: The config.
        head_dims: Elements of a head, for each type of layer.
        types: The rope types that the family may have.
        partial: Whether a part of a head may turn.

    Raises:
        ValueError: As for `read_rope`, or a type of layer has none.
    """
    ropes, found = fields.object("rope_parameters"), {}
    for kind, head_dim in head_dims.items():
        own = None if ropes is None else ropes.object(kind)
        if own is None:
            raise ValueError(f"{fields.where}: rope_parameters has no {kind}")
        found[kind] = _layer_rope(own, head_dim, types, partial=partial)
    if ropes is not None:
        ropes.done()
    return found


def read_older_layer_rope(
    where: str,
    newer: Mapping[str, Any],
    scaling: Fields | None,
    head_dim: int,
    types: Collection[str],
    *,
    partial: bool = False,
    **own: float | None,
) -> Rope:
    """The rotary embedding of a layer by the older dialect, where both may be there.

    What its keys leave open is as in the newer dialect.

    Args:
        where: What error messages call the config.
        newer: The newer dialect's object for the layer; empty where there is none.
        scaling: ``rope_scaling``, if the layer is stretched: in place of all of ``newer`` but for ``own``.
        head_dim: Elements of a head.
        types: The rope types that the family may have.
        partial: Whether a part of a head may turn.
        **own: Settings that have keys of their own; None where they do not say.

    Raises:
        ValueError: As for `read_rope`.
    """
    said = {key: value for key, value in own.items() if value is not None}
    settings = dict(newer)
    if scaling is not None:
        settings = {**{key: newer[key] for key in own if key in newer}, **scaling.raw}
        for key, value in said.items():
            if scaling.get(key, value) != value:
                raise ValueError(
                    f"{scaling.where}: {key} is given twice and differs: {scaling.get(key)}, {value}"
                )
    return _layer_rope(
        Fields({**settings, **said}, f"{where}: rope_scaling"), head_dim, types, partial=partial
    )


def context_of(fields: Fields, rope: Rope | None) -> int:
    """Tokens that a sequence may have: what the key says, or what YaRN makes of the original context.

    Published files that are to be stretched keep the key as it was.

    Raises:
        ValueError: There is no number, or the original context is beyond it.
    """
    key = "max_position_embeddings"
    limit = fields.integer(key, most=MAX_TOKENS)
    if rope is None or not isinstance(rope.scaling, Yarn):
        return limit
    if (original := rope.scaling.original_context) > limit:
        raise ValueError(f"{fields.where}: original_{key} {original} is beyond {key} {limit}")
    return max(limit, int(original * rope.scaling.factor))


def part_of_head(where: str, key: str, share: float, head_dim: int, *, odd: bool = False) -> int:
    """How many elements of a head turn.

    Args:
        where: What error messages call the object that has the key.
        key: The key.
        share: What it says: their share of all.
        head_dim: Elements of a head.
        odd: Whether one may be left over.

    Raises:
        ValueError: They are none, or more than there are, or make no pairs.
    """
    size = int(share * head_dim)
    if not (size >= 2 and share <= 1 and (odd or size % 2 == 0)):
        wanted = "at least 2 of them" if odd else "2, 4, 6, ... of them"
        raise ValueError(
            f"{where}: {key}={share!r} makes {size} of {head_dim} elements of a head turn; "
            f"it must be at most 1 and make {wanted} turn"
        )
    return size


def _assume_share(fields: Fields, found: Collection[Fields], share: float) -> None:
    """Gives the objects of a rotary embedding the turning part that one of them or the config itself has."""
    key = "partial_rotary_factor"
    said = {own.positive(key) for own in (fields, *found) if key in own}
    if len(said) > 1:
        raise ValueError(f"{fields.where}: {key} is given twice and differs: {sorted(said)}")
    for own in found:
        own.assume(**{key: next(iter(said), share)})


def _layer_rope(own: Fields, head_dim: int, types: Collection[str], *, partial: bool) -> Rope:
    """The rotary embedding of one type of layer, from its own object, which has the base."""
    return _rope(own, _kind(own, types), head_dim, own.positive("rope_theta"), partial=partial)


def _kind(own: Fields, types: Collection[str]) -> str:
    kind = own.get("rope_type", own.get("type", "default"))
    own.check_agree("rope_type", kind, own.get("type", kind), "type")
    if kind not in types:
        where, _, name = own.where.rpartition(": ")
        raise ValueError(f"{where}: unsupported rope type {kind!r} in {name}; supported: {', '.join(types)}")
    return kind


def _rope(own: Fields, kind: str, head_dim: int, theta: float, *, partial: bool = False) -> Rope:
    """One object as a record; whatever it holds beside is refused."""
    where, _, name = own.where.rpartition(": ")
    own.inert("rope_theta", "rope_type", "type")
    size, turning, scaling = head_dim, None, None
    share = own.optional("partial_rotary_factor") or 1.0
    if share != 1.0 and not partial and kind != "proportional":
        raise ValueError(f"{where}: unsupported settings partial_rotary_factor {share} in {name}")
    if kind == "proportional":
        # An odd element out is left to those that do not turn.
        turning = part_of_head(own.where, "partial_rotary_factor", share, head_dim, odd=True) // 2
    elif share != 1.0:
        size = part_of_head(own.where, "partial_rotary_factor", share, head_dim)
    if kind in ("linear", "llama3", "yarn"):
        scaling = _scaling(own, kind, theta)
    if surplus := sorted(own.unread()):
        raise ValueError(f"{where}: unsupported settings {surplus} of rope type {kind!r} in {name}")
    return Rope(theta, size, turning, scaling)


def _scaling(own: Fields, kind: str, theta: float) -> Scaling:
    factor = own.positive("factor")
    if kind == "linear":
        return Linear(factor)
    original = own.integer("original_max_position_embeddings", most=MAX_TOKENS)
    if kind == "llama3":
        return Llama3(factor, own.positive("low_freq_factor"), own.positive("high_freq_factor"), original)
    fast, slow = own.optional("beta_fast") or 32.0, own.optional("beta_slow") or 1.0
    if factor < 1:
        raise own.error("factor", "at least 1 for rope type 'yarn'", factor)
    if fast < slow:
        raise own.error("beta_fast", f"at least beta_slow, which is {slow}", fast)
    if theta <= 1:
        raise own.error("rope_theta", "above 1 for rope type 'yarn'", theta)
    truncate = own.flag("truncate", default=True)
    return Yarn(factor, fast, slow, original, truncate, _attention_factor(own, factor))


def _attention_factor(own: Fields, factor: float) -> float:
    """What YaRN multiplies cosines and sines with.

    Source: YaRN, section 3.4; with two weights as DeepSeek-V2 has it.

    Raises:
        ValueError: One weight is there without the other, or the factor is given too and differs.
    """
    said = own.optional("attention_factor")
    over, under = own.optional("mscale"), own.optional("mscale_all_dim")
    if (over is None) != (under is None):
        # Readers differ in what they take the other one to be.
        raise ValueError(f"{own.where}: of mscale and mscale_all_dim one is there without the other")
    growth = 0.1 * math.log(factor)
    if over is None or under is None:
        return growth + 1 if said is None else said
    found = (over * growth + 1) / (under * growth + 1)
    if said is not None and not math.isclose(said, found, rel_tol=1e-6):
        raise ValueError(
            f"{own.where}: attention_factor is {said}, and mscale {over} and mscale_all_dim {under} "
            f"make it {found:.6g}"
        )
    return found if said is None else said
