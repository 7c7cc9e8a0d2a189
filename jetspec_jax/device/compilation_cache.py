"""Compiled programs kept between processes: JAX's persistent compilation cache, with a place of its own.

A first request compiles for seconds. JAX can keep what it compiled in a folder, one for the whole process,
and read it back when the same program is wanted again from the same JAX for the same kind of device.
"""

import logging
import secrets
import tempfile
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from jetspec_jax.device.processes import agreed, gathered, is_first

# All programs are kept, also those that compile in less than JAX's usual second: a run begins with some
# twenty small ones, and their times add up.
MIN_COMPILE_SECONDS = 0.0

# JAX's settings, which its Config class does not declare.
_FOLDER = "jax_compilation_cache_dir"
_ENABLED = "jax_enable_compilation_cache"
_MIN_SECONDS = "jax_persistent_cache_min_compile_time_secs"

_log = logging.getLogger("jetspec_jax")


def enable_compilation_cache(folder: str | Path = "auto", *, together: bool = False) -> None:
    """Keeps compiled programs in a folder, where later processes find them.

    This is a setting of JAX for the whole process: programs of other code are kept as well. Nothing is ever
    removed from the folder; it may be deleted at any time. Whoever can write to it can make this process run
    code, so it should be the user's own. A folder that cannot be written to is a line of the log, no error.

    Args:
        folder: Where to. "auto" is ``jetspec_jax/compiled`` in the user's cache folder (on Linux
            ``$XDG_CACHE_HOME`` or ``~/.cache``); it changes nothing where JAX has been told of a folder
            already or not to keep programs, and nothing on a CPU. A folder that is named is used in any case.
            "off" changes nothing.
        together: Whether all processes of a program call this, because they run programs on one mesh. JAX
            writes in the first alone, so they use a folder only if all of them see it: a process that
            compiles what another has read could wait for it for ever, because XLA times kernels in all
            processes together.

    Raises:
        OutOfStep: Another process calls something else.
    """
    if folder == "off":
        return
    if folder == "auto":
        chosen = getattr(jax.config, _FOLDER) or not getattr(jax.config, _ENABLED)
        # XLA may find that a CPU lacks features that it compiled for a moment ago: it then logs pages of them
        # and compiles anew (jax-ml/jax#38445), or worse, runs what the processor cannot.
        if chosen or jax.default_backend() == "cpu":
            return
        path = _users_folder() / "compiled"
    else:
        path = Path(folder).expanduser().absolute()
    problem = _problem(path) if not together or is_first() else ""
    if together:
        problem = agreed(problem, "the folder of compiled programs") or _not_shared(path)
    if problem:
        if not together or is_first():
            _log.warning("compiled programs are not kept: %s", problem)
        return
    jax.config.update(_ENABLED, True)
    jax.config.update(_FOLDER, str(path))
    jax.config.update(_MIN_SECONDS, MIN_COMPILE_SECONDS)
    # JAX opens the folder once, when it first compiles.
    compilation_cache.reset_cache()


def notes_folder(folder: str | Path = "auto") -> Path | None:
    """The folder that keeps measurements of this machine for later processes, beside compiled programs.

    Args:
        folder: As for `enable_compilation_cache`, which has been called. "auto" is JAX's folder where it has
            one, else the user's cache folder, on a CPU too; "off" is none.
    """
    if folder != "auto":
        return None if folder == "off" else Path(folder).expanduser().absolute()
    if not getattr(jax.config, _ENABLED):
        return None
    chosen = getattr(jax.config, _FOLDER)
    if not chosen:
        return _users_folder()
    return None if "://" in chosen else Path(chosen)  # a bucket of a cloud is no folder


def _users_folder() -> Path:
    import platformdirs

    return platformdirs.user_cache_path("jetspec_jax", appauthor=False)


def _problem(path: Path) -> str:
    """Why a folder cannot be written to; it is made if need be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        return f"cannot write to {path}: {error.strerror}"
    return ""


def _not_shared(path: Path) -> str:
    """Why the first process's folder is not that of all, if it is not."""
    name = agreed(f".shared-{secrets.token_hex(8)}", "a file for all to see")
    if is_first():
        (path / name).touch()
    try:
        gathered(None, "the file is there")
        seen = gathered((path / name).exists(), "whether it is seen")
    finally:
        if is_first():
            (path / name).unlink(missing_ok=True)
    if all(seen):
        return ""
    return f"{path} is not shared by all processes; name a folder that is"
