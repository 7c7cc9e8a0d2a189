"""Verifies a conversion: compares all bits of the parameters, and the model's outputs.

Both folders are read from their files twice: once to compare one parameter at a time, and once to compute the
outputs layer by layer. So memory holds little more than the embedding in float32 and a few layers.
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

# With another type, outputs differ by rounding. bfloat16 keeps 8 of 24 bits, which changes each weight by at
# most 1/256, and the outputs of the tests' models by less than a tenth. A misplaced or transposed tensor
# gives nearly unrelated outputs, whose difference is larger than the outputs. The bound of one half is in
# between.
LARGEST_RELATIVE_DIFFERENCE = 0.5


@dataclass(frozen=True)
class Verification:
    """The result of a comparison of two folders.

    Attributes:
        parameters: The number of compared parameters.
        differing: Names of parameters with a wrong type or wrong bits.
        differing_files: Files that are not equal byte for byte, except a config with MXFP4.
        compared: The compared outputs: "logits of 32 tokens", ...
        largest_difference: The largest difference of two outputs.
        relative_difference: The root mean square of the difference over that of the source's outputs.
        finite: Whether all outputs are finite.
        same_type: Whether types were kept, so that the outputs must be equal.
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
        """Whether the conversion is correct."""
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
    """Compares a checkpoint with its conversion.

    The parameters must be the source's bit for bit, or the source's rounded to ``dtype``. The outputs are a
    target's logits of random tokens; a draft head's draft logits with a target; or a head's hidden states of
    random slots after random taps. They are computed in float32 on the CPU.

    Args:
        source: The source, as for `locate`.
        destination: The conversion, in another layout.
        target: A draft head's target, or None.
        dtype: The type given to the conversion.

    Raises:
        FileNotFoundError: A checkpoint cannot be found or fetched.
        ValueError: A checkpoint is invalid, both have the same layout, or their configs differ; or ``target``
            is given for a target, or does not fit the head.
    """
    before, after = locate(source), locate(destination)
    if before.layout == after.layout:
        raise ValueError(f"{before.folder} and {after.folder} are both of the layout {before.layout}")
    if before.config != after.config:
        raise ValueError(f"{after.folder} has another config than {before.folder}")
    to = parse_dtype(dtype)
    drafted_for = check_target(before, target)
    # If types change, the tensors of one parameter may have different types; float32 represents them all.
    exact = jnp.dtype(jnp.float32) if to is not None and before.layout == "huggingface" else None
    # On the CPU, because a GPU's memory may be smaller than the model.
    ours, theirs = before.opened(exact), after.opened()
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        outputs = outputs_of(before, drafted_for)
        differing = _differing(before.config, ours, theirs, to)
        first, second = (outputs(nnx.traversals.unflatten_mapping(arrays)) for arrays in (ours, theirs))
    with np.errstate(invalid="ignore"):  # a difference of two infinities is reported as not finite
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
    """Finds the target for a draft head's outputs, and checks that they fit; None without a target.

    Raises:
        FileNotFoundError: The target cannot be found or fetched.
        ValueError: ``target`` is no target, does not fit the head, or ``checkpoint`` is no head.
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
    """Config and tokenizer files of the destination that differ from those a conversion writes."""
    before, after = converted_files(source), kept_files(destination.folder)
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def _differing(
    config: ModelConfig | DraftHeadConfig,
    source: Mapping[ParameterPath, Unread],
    converted: Mapping[ParameterPath, Unread],
    to: np.dtype | None,
) -> list[str]:
    """Names of the parameters that differ from the source's, after rounding to ``to``."""
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
    """The bytes: as numbers, 0 and -0 would be equal, and NaNs would not."""
    return np.ascontiguousarray(value).view(np.uint8)


def _describe(checkpoint: Checkpoint, target: Checkpoint | None) -> str:
    if isinstance(checkpoint.config, DraftHeadConfig):
        return "hidden states of random slots" if target is None else "draft logits"
    return f"logits of {fixed_tokens(checkpoint.config).shape[1]} tokens"
