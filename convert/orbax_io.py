"""Writes and reads Orbax folders, whose chunks allow each device of a mesh to read only its shards.

Storage is zarr3 in OCDBT, compressed, in chunks of at most `CHUNK_BYTES` that split a parameter's longest
axis. Arrays are written and read one at a time, which needs little memory besides the weights.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from tqdm import tqdm

from convert.folders import Checkpoint, locate
from jetspec_jax import __version__
from jetspec_jax.checkpoint.content import CheckpointError
from jetspec_jax.checkpoint.files import new_folder, write_files
from jetspec_jax.checkpoint.orbax import FORMAT, MANIFEST, VERSION, WEIGHTS
from jetspec_jax.checkpoint.orbax_arrays import first_line, open_checkpointer, quiet
from jetspec_jax.models import Weights

CHUNK_BYTES = 4 * 2**20


def write_orbax(folder: str | Path, kind: str, config_files: Mapping[str, bytes], weights: Weights) -> None:
    """Writes an Orbax folder atomically.

    ``config_files`` are ``config.json`` and the tokenizer's files. ``weights`` are NumPy arrays, or `Unread`
    arrays, which are read when they are written.

    Raises:
        FileExistsError: The folder exists.
        CheckpointError: A parameter cannot be read.
        OSError: The disk is full, or cannot be written.
    """
    manifest = {"format": FORMAT, "version": VERSION, "kind": kind, "jetspec_jax": __version__}
    text, count = f"writing {Path(folder).name}", len(jax.tree.leaves(weights))
    with (
        new_folder(Path(folder)) as partial,
        # The delay hides the bar for small checkpoints.
        tqdm(total=count, desc=text, unit=" parameters", delay=1, leave=False, disable=None) as bar,
        open_checkpointer(bar) as checkpointer,
    ):
        arguments = ocp.args.PyTreeSave(
            weights, save_args=jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES), weights)
        )
        try:
            with quiet():
                checkpointer.save((partial / WEIGHTS).absolute(), args=arguments)
        except CheckpointError:  # of a parameter that is read while it is written
            raise
        except (ValueError, RuntimeError) as error:  # how Orbax's storage library reports a failed write
            raise OSError(f"{folder} cannot be written: {first_line(error)}") from error
        write_files(partial, {**config_files, MANIFEST: json.dumps(manifest, indent=2) + "\n"})


def read_orbax(folder: str | Path | Checkpoint) -> Weights:
    """Reads the parameters of an Orbax folder into NumPy arrays of their stored types.

    Raises:
        FileNotFoundError: The folder is missing.
        CheckpointError: The folder is a Hugging Face folder, incomplete, or of another version; or its
            parameters do not fit its config (all differences are listed), are not finite, or cannot be read.
    """
    checkpoint = locate(folder)
    if checkpoint.layout != "orbax":
        raise CheckpointError(
            f"{checkpoint.folder} is a Hugging Face folder; an Orbax folder holds {MANIFEST}"
        )
    return nnx.traversals.unflatten_mapping(
        {path: np.asarray(array) for path, array in checkpoint.opened().items()}
    )
