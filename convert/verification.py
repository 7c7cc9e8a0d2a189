"""Whether a conversion is right: every bit of the parameters, and what the model computes with them.

Both folders are read again from their files, twice: parameters pass by one at a time, then the outputs are
computed layer by layer. So in memory there is little more than the embedding in float32 and a few layers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tqdm import tqdm

from convert.conversion import STORED, parse_dtype
from convert.folders import Checkpoint, converted_files, kept_files, locate
from convert.outputs import fixed_tokens, outputs_of
from jetspec_jax.checkpoint.tensor_plan import ParameterPath
from jetspec_jax.checkpoint.unread import Unread
from jetspec_jax.config import DraftHeadConfig, ModelConfig, check_head_fits
from jetspec_jax.models import dtype_of

# With a type named, the outputs differ by rounding: in bfloat16, which keeps 8 bits of 24, each weight by at
# most 1/256, and the outputs of the tests' models by less than a tenth. A tensor that went to the wrong place
# or has its axes in the wrong order gives outputs that have little to do with the right ones, and the
# difference of unrelated ones is larger than either. Half the size lies between.
LARGEST_RELATIVE_DIFFERENCE = 0.5


@dataclass(frozen=True)
class Verification:
    """What a comparison of two folders found.

    Attributes:
        parameters: How many parameters were compared.
        differing: Names of those whose type or bits are not what the conversion should have made of them.
        differing_files: Config and tokenizer files that are not what the conversion should have made of them:
            the same, byte for byte, but for a config of weights in MXFP4.
        compared: What outputs were computed: "logits of 32 tokens", ...
        largest_difference: Between two values of the outputs.
        relative_difference: Root mean square of the outputs' difference, over that of the source's outputs.
        finite: Whether all outputs are finite.
        same_type: Whether the types were to stay as they are, so that the outputs must be equal.
    """

    parameters: int
    differing: tuple[str, ...]
    differing_files: tuple[str, ...]
    compared: str
    largest_difference: float
    relative_difference: float
    finite: bool
    same_type: bool

    @property
    def ok(self) -> bool:
        """Whether the conversion is right."""
        allowed = 0.0 if self.same_type else LARGEST_RELATIVE_DIFFERENCE
        close = self.finite and self.relative_difference <= allowed
        return close and not self.differing and not self.differing_files


def verify(
    source: str | Path | Checkpoint,
    destination: str | Path | Checkpoint,
    *,
    target: str | Path | Checkpoint | None = None,
    dtype: str = STORED,
) -> Verification:
    """Compares a checkpoint with what it was converted to.

    The parameters must be the source's bit for bit, or, with a type named, the source's rounded to it. The
    outputs are a target's logits of random tokens; a draft head's draft logits with a target; or, without
    one, its hidden states of random slots after random taps. They are computed in float32 on the CPU.

    Args:
        source: What was converted: a folder of either layout, a hub id, or what `locate` found.
        destination: What it was converted to, of the other layout.
        target: For a draft head, the target to draft for.
        dtype: As it was given to the conversion.

    Raises:
        FileNotFoundError: One of them cannot be found or fetched.
        ValueError: One of them is no checkpoint or cannot be read, both have one layout or the configs
            differ; or ``target`` is given for something that is no head, or does not fit.
    """
    before, after = locate(source), locate(destination)
    if before.layout == after.layout:
        raise ValueError(f"{before.folder} and {after.folder} are both of the layout {before.layout}")
    if before.config != after.config:
        raise ValueError(f"{after.folder} has another config than {before.folder}")
    to = parse_dtype(dtype)
    drafted_for = check_target(before, target)
    # Where types change, tensors that make up one parameter may have had several: float32 holds them all.
    exact = jnp.dtype(jnp.float32) if to is not None and before.layout == "huggingface" else None
    # The CPU has the memory; a GPU may be smaller than the model.
    ours, theirs = before.opened(exact), after.opened()
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        outputs = outputs_of(before, drafted_for)
        differing = _differing(before.config, ours, theirs, to)
        first, second = (outputs(nnx.traversals.unflatten_mapping(arrays)) for arrays in (ours, theirs))
    with np.errstate(invalid="ignore"):  # of two infinities; it is reported as not finite
        difference = second.astype(np.float64) - first.astype(np.float64)
    size = np.sqrt(np.mean(np.square(first, dtype=np.float64)))
    return Verification(
        parameters=len(ours),
        differing=tuple(differing),
        differing_files=tuple(differing_files(before, after)),
        compared=_describe(before, drafted_for),
        largest_difference=float(np.abs(difference).max()),
        relative_difference=float(np.sqrt(np.mean(np.square(difference))) / max(size, 1e-30)),
        finite=bool(np.isfinite(first).all() and np.isfinite(second).all()),
        same_type=to is None,
    )


def check_target(checkpoint: Checkpoint, target: str | Path | Checkpoint | None) -> Checkpoint | None:
    """The target that a head's outputs are computed with; None without one.

    Args:
        checkpoint: The head.
        target: A folder of either layout, a hub id, or what `locate` found.

    Raises:
        FileNotFoundError: It cannot be found or fetched.
        ValueError: It is no target or the head does not fit it, or the checkpoint is no head.
    """
    if target is None:
        return None
    if not isinstance(checkpoint.config, DraftHeadConfig):
        raise ValueError(f"{checkpoint.folder} is a target: only a draft head is verified with a target")
    found = locate(target)
    if isinstance(found.config, DraftHeadConfig):
        raise ValueError(f"{found.folder} is a draft head; a target is needed")
    check_head_fits(checkpoint.config, found.config)
    return found


def differing_files(source: Checkpoint, destination: Checkpoint) -> list[str]:
    """Config and tokenizer files of the destination that are not what a conversion makes of the source's."""
    before, after = converted_files(source), kept_files(destination.folder)
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def _differing(
    config: ModelConfig | DraftHeadConfig,
    source: Mapping[ParameterPath, Unread],
    converted: Mapping[ParameterPath, Unread],
    to: np.dtype | None,
) -> list[str]:
    """Names of the parameters that differ; the source's are rounded before."""
    found = []
    for path in tqdm(source, desc="comparing", unit=" parameters", delay=1, disable=None, leave=False):
        ours, theirs = np.asarray(source[path]), np.asarray(converted[path])
        if to is not None:
            with np.errstate(over="ignore", invalid="ignore"):
                ours = ours.astype(dtype_of(config, path, to))
        if ours.dtype != theirs.dtype or not np.array_equal(_bits(ours), _bits(theirs)):
            found.append(".".join(map(str, path)))
    return found


def _bits(value: np.ndarray) -> np.ndarray:
    """The bytes: as numbers, two zeros would be equal and no NaN would be."""
    return np.ascontiguousarray(value).view(np.uint8)


def _describe(checkpoint: Checkpoint, target: Checkpoint | None) -> str:
    if isinstance(checkpoint.config, DraftHeadConfig):
        return "hidden states of random slots" if target is None else "draft logits"
    return f"logits of {fixed_tokens(checkpoint.config).shape[1]} tokens"
