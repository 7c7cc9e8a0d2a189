"""Sets up JAX's persistent compilation cache, in a folder for this package.

A first request compiles for seconds. JAX can store compiled programs in a folder and load them for the same
program, version of JAX and kind of device.
"""

import logging
import secrets
import tempfile
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from jetspec_jax.device.processes import agreed, gathered, is_first

# Also cache programs that compile in less than JAX's default of one second: a run starts with about twenty
# small ones, whose times add up.
MIN_COMPILE_SECONDS = 0.0

# Names of JAX's settings, which its Config class does not declare.
_FOLDER = "jax_compilation_cache_dir"
_ENABLED = "jax_enable_compilation_cache"
_MIN_SECONDS = "jax_persistent_cache_min_compile_time_secs"

_log = logging.getLogger("jetspec_jax")


def enable_compilation_cache(folder: str | Path = "auto", *, together: bool = False) -> None:
    """Caches compiled programs in a folder for later processes.

    This is a setting of JAX for the whole process, so programs of other code are cached too. Nothing is ever
    removed from the folder; it may be deleted at any time. Anyone who can write to it can make this process
    run code, so it should belong to the user. If it cannot be written, a warning is logged.

    Args:
        folder: The folder. "auto" is ``jetspec_jax/compiled`` in the user's cache folder (on Linux
            ``$XDG_CACHE_HOME`` or ``~/.cache``). "auto" changes nothing on a CPU, or if JAX's cache is
            already configured or disabled. A given folder is always used. "off" changes nothing.
        together: Whether all processes of a program call this, because they run programs on one mesh. JAX
            writes only in the first process, so the folder is used only if all processes see it. Otherwise
            one process might compile a program that another has loaded, and wait for ever, because XLA times
            kernels in all processes together.

    Raises:
        OutOfStep: Another process calls something else.
    """
    if folder == "off":
        return
    if folder == "auto":
        import platformdirs

        chosen = getattr(jax.config, _FOLDER) or not getattr(jax.config, _ENABLED)
        # XLA may decide that a CPU lacks features of a program that it compiled on the same CPU. Then it logs
        # pages of them and recompiles (jax-ml/jax#38445), or runs instructions that the CPU lacks.
        if chosen or jax.default_backend() == "cpu":
            return
        path = platformdirs.user_cache_path("jetspec_jax", appauthor=False) / "compiled"
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
    # JAX opens the folder only at its first compilation, so an open one is closed.
    compilation_cache.reset_cache()


def _problem(path: Path) -> str:
    """The reason why a folder cannot be written, or ""; creates the folder if needed."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        return f"cannot write to {path}: {error.strerror}"
    return ""


def _not_shared(path: Path) -> str:
    """The reason why the folder is not shared by all processes, or ""."""
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
    return f"{path} is not shared by all processes; choose a shared folder"
