"""Orbax folders: the parameters as chunks that each device of a mesh reads its part of.

Storage is zarr3 in OCDBT, compressed, in chunks of at most `CHUNK_BYTES` that split a parameter's longest
axis. Arrays are written and read one by one, so that either needs little memory besides the weights.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import jax
import orbax.checkpoint as ocp

import jetspec_jax.checkpoint.orbax as folders
from convert.folders import Checkpoint, locate
from jetspec_jax import __version__
from jetspec_jax.checkpoint.content import CheckpointError
from jetspec_jax.checkpoint.files import new_folder, write_files
from jetspec_jax.checkpoint.orbax import FORMAT, MANIFEST, VERSION, WEIGHTS
from jetspec_jax.checkpoint.orbax_arrays import first_line, open_checkpointer, progress, quiet
from jetspec_jax.models import Weights

CHUNK_BYTES = 4 * 2**20


def write_orbax(folder: str | Path, kind: str, config_files: Mapping[str, bytes], weights: Weights) -> None:
    """Writes an Orbax folder, whole or not at all.

    Args:
        folder: Where to; it must not exist yet.
        kind: "target" or "draft head".
        config_files: ``config.json`` and the tokenizer's files.
        weights: The parameters, as NumPy arrays or what stands in their place, such as
            `Unread`: each is made when it is written.

    Raises:
        FileExistsError: The folder exists.
        CheckpointError: A parameter that is made when it is written cannot be.
        OSError: The disk is full, or cannot be written.
    """
    manifest = {"format": FORMAT, "version": VERSION, "kind": kind, "jetspec_jax": __version__}
    count = len(jax.tree.leaves(weights))
    with (
        new_folder(Path(folder)) as partial,
        progress(f"writing {Path(folder).name}", count) as bar,
        open_checkpointer(bar) as checkpointer,
    ):
        arguments = ocp.args.PyTreeSave(
            weights, save_args=jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES), weights)
        )
        try:
            with quiet():
                checkpointer.save((partial / WEIGHTS).absolute(), args=arguments)
        except CheckpointError:  # of what is read meanwhile
            raise
        except (ValueError, RuntimeError) as error:  # how Orbax's storage library reports a failed write
            raise OSError(f"{folder} cannot be written: {first_line(error)}") from error
        write_files(partial, {**config_files, MANIFEST: json.dumps(manifest, indent=2) + "\n"})


def read_orbax(folder: str | Path | Checkpoint) -> Weights:
    """Reads the parameters of an Orbax folder into NumPy arrays, each in the type that it is stored in.

    Args:
        folder: What `write_orbax` wrote, or what `locate` found it to be.

    Raises:
        FileNotFoundError: There is no such folder.
        CheckpointError: It is a Hugging Face folder, no whole Orbax folder, or one of another version, or its
            parameters are not its config's (all that differ are listed), or not finite, or cannot be read.
    """
    checkpoint = locate(folder)
    if checkpoint.layout != "orbax":
        raise CheckpointError(
            f"{checkpoint.folder} is a Hugging Face folder; an Orbax folder holds {MANIFEST}"
        )
    return folders.read_orbax(
        checkpoint.folder, checkpoint.config, allow_nonfinite=checkpoint.allow_nonfinite
    )
