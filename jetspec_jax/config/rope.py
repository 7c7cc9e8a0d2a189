"""The rotary embedding of a config, in the older dialect (``rope_theta``, ``rope_scaling``) or the newer one.

The newer dialect has ``rope_parameters``: one object, or one for each layer type.
"""

import math
from collections.abc import Collection, Mapping
from typing import Any

from jetspec_jax.config.fields import MAX_TOKENS, Fields
from jetspec_jax.config.geometry import Linear, Llama3, Rope, Scaling, Yarn

FULL, SLIDING = "full_attention", "sliding_attention"
QWEN3_TYPES = ("default", "yarn")
#: The rope types of Llama and Mistral, and their base if a file has none, on which all readers agree.
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
    """The rotary embedding of all layers, from either dialect or both.

    Without ``theta`` the config must have the base. ``share`` is the default fraction of a head that is
    rotated; None means always the whole head. Settings in ``inert`` have no effect on text.
    """
    bases = {fields.positive("rope_theta")} if "rope_theta" in fields else set()
    found = []
    for name in ("rope_parameters", "rope_scaling"):
        if (settings := fields.object(name)) is not None:
            if "rope_theta" in settings:
                bases.add(settings.positive("rope_theta"))
            settings.inert(*inert)
            found.append((settings, _kind(settings, types)))
    if not bases and theta is not None:
        bases = {theta}
    if not bases:
        raise ValueError(f"{fields.where}: neither rope_theta nor rope_parameters.rope_theta is there")
    if len(bases) > 1:
        raise ValueError(f"{fields.where}: rope_theta is given twice and differs: {sorted(bases)}")
    (theta,) = bases
    found = found or [(Fields({}, f"{fields.where}: rope_parameters"), "default")]
    if share is not None:
        _assume_share(fields, [settings for settings, _ in found], share)
    partial = share is not None
    ropes = {_rope(settings, kind, head_dim, theta, partial=partial) for settings, kind in found}
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
    """The rotary embedding of each layer type, from the objects of the newer dialect."""
    ropes, found = fields.object("rope_parameters"), {}
    for kind, head_dim in head_dims.items():
        settings = None if ropes is None else ropes.object(kind)
        if settings is None:
            raise ValueError(f"{fields.where}: rope_parameters has no {kind}")
        found[kind] = _layer_rope(settings, head_dim, types, partial=partial)
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
    **older: float | None,
) -> Rope:
    """The rotary embedding of a layer by the older dialect; absent keys default to the newer dialect's.

    ``newer`` is the newer dialect's object for the layer. ``scaling`` (``rope_scaling``, if it applies to the
    layer) replaces it except for the keys of ``older``, which the older dialect stores separately.
    """
    given = {key: value for key, value in older.items() if value is not None}
    settings = dict(newer)
    if scaling is not None:
        settings = {**{key: newer[key] for key in older if key in newer}, **scaling.raw}
        for key, value in given.items():
            if scaling.get(key, value) != value:
                raise ValueError(
                    f"{scaling.where}: {key} is given twice and differs: {scaling.get(key)}, {value}"
                )
    return _layer_rope(
        Fields({**settings, **given}, f"{where}: rope_scaling"), head_dim, types, partial=partial
    )


def context_of(fields: Fields, rope: Rope | None) -> int:
    """The longest sequence in tokens: ``max_position_embeddings``, or more with YaRN.

    Files with YaRN often keep the unscaled ``max_position_embeddings``, so the larger number counts.
    """
    key = "max_position_embeddings"
    limit = fields.integer(key, most=MAX_TOKENS)
    if rope is None or not isinstance(rope.scaling, Yarn):
        return limit
    if (original := rope.scaling.original_context) > limit:
        raise ValueError(f"{fields.where}: original_{key} {original} is beyond {key} {limit}")
    return max(limit, int(original * rope.scaling.factor))


def part_of_head(where: str, key: str, share: float, head_dim: int, *, odd: bool = False) -> int:
    """The number of rotated elements of a head: a ``share`` of them, ``key`` of the object ``where``."""
    size = int(share * head_dim)
    if not (size >= 2 and share <= 1 and (odd or size % 2 == 0)):
        expected = "at least 2 of them" if odd else "2, 4, 6, ... of them"
        raise ValueError(
            f"{where}: {key}={share!r} makes {size} of {head_dim} elements of a head turn; "
            f"it must be at most 1 and make {expected} turn"
        )
    return size


def _assume_share(fields: Fields, found: Collection[Fields], share: float) -> None:
    """Sets the rotated fraction of all objects: the one that the config or an object has, or the default."""
    key = "partial_rotary_factor"
    shares = {settings.positive(key) for settings in (fields, *found) if key in settings}
    if len(shares) > 1:
        raise ValueError(f"{fields.where}: {key} is given twice and differs: {sorted(shares)}")
    for settings in found:
        settings.assume(**{key: next(iter(shares), share)})


def _layer_rope(settings: Fields, head_dim: int, types: Collection[str], *, partial: bool) -> Rope:
    """The rotary embedding of one layer type, from its object, which has the base."""
    return _rope(settings, _kind(settings, types), head_dim, settings.positive("rope_theta"), partial=partial)


def _kind(settings: Fields, types: Collection[str]) -> str:
    kind = settings.get("rope_type", settings.get("type", "default"))
    settings.check_agree("rope_type", kind, settings.get("type", kind), "type")
    if kind not in types:
        where, _, name = settings.where.rpartition(": ")
        raise ValueError(f"{where}: unsupported rope type {kind!r} in {name}; supported: {', '.join(types)}")
    return kind


def _rope(settings: Fields, kind: str, head_dim: int, theta: float, *, partial: bool = False) -> Rope:
    """A `Rope` from one object; unknown keys are refused."""
    where, _, name = settings.where.rpartition(": ")
    settings.inert("rope_theta", "rope_type", "type")
    size, turning, scaling = head_dim, None, None
    share = settings.optional("partial_rotary_factor") or 1.0
    if share != 1.0 and not partial and kind != "proportional":
        raise ValueError(f"{where}: unsupported settings partial_rotary_factor {share} in {name}")
    if kind == "proportional":
        # With an odd number of elements, the last is not rotated.
        turning = part_of_head(settings.where, "partial_rotary_factor", share, head_dim, odd=True) // 2
    elif share != 1.0:
        size = part_of_head(settings.where, "partial_rotary_factor", share, head_dim)
    if kind in ("linear", "llama3", "yarn"):
        scaling = _scaling(settings, kind, theta)
    if surplus := sorted(settings.unread()):
        raise ValueError(f"{where}: unsupported settings {surplus} of rope type {kind!r} in {name}")
    return Rope(theta, size, turning, scaling)


def _scaling(settings: Fields, kind: str, theta: float) -> Scaling:
    factor = settings.positive("factor")
    if kind == "linear":
        return Linear(factor)
    original = settings.integer("original_max_position_embeddings", most=MAX_TOKENS)
    if kind == "llama3":
        return Llama3(
            factor, settings.positive("low_freq_factor"), settings.positive("high_freq_factor"), original
        )
    fast, slow = settings.optional("beta_fast") or 32.0, settings.optional("beta_slow") or 1.0
    if factor < 1:
        raise settings.error("factor", "at least 1 for rope type 'yarn'", factor)
    if fast < slow:
        raise settings.error("beta_fast", f"at least beta_slow, which is {slow}", fast)
    if theta <= 1:
        raise settings.error("rope_theta", "above 1 for rope type 'yarn'", theta)
    truncate = settings.flag("truncate", default=True)
    return Yarn(factor, fast, slow, original, truncate, _attention_factor(settings, factor))


def _attention_factor(settings: Fields, factor: float) -> float:
    """YaRN's factor of cosines and sines.

    Source: YaRN, section 3.4; the form with ``mscale`` and ``mscale_all_dim`` is DeepSeek-V2's.
    """
    given = settings.optional("attention_factor")
    over, under = settings.optional("mscale"), settings.optional("mscale_all_dim")
    if (over is None) != (under is None):
        # Readers have different defaults for the other.
        raise ValueError(f"{settings.where}: mscale and mscale_all_dim must be given together")
    growth = 0.1 * math.log(factor)
    if over is None or under is None:
        return growth + 1 if given is None else given
    found = (over * growth + 1) / (under * growth + 1)
    if given is not None and not math.isclose(given, found, rel_tol=1e-6):
        raise ValueError(
            f"{settings.where}: attention_factor is {given}, and mscale {over} and mscale_all_dim {under} "
            f"make it {found:.6g}"
        )
    return found if given is None else given
