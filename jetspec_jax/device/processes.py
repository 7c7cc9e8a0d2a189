"""Communication between the processes of one program.

All processes make the same calls in the same order. Values that may differ, such as clocks and random
numbers, are broadcast by the first process.

Messages go through the key-value store of `jax.distributed`. It has no public name in JAX, but Orbax uses it
in the same way, and it is unchanged from JAX 0.10 to 0.12. The public `multihost_utils.broadcast_one_to_all`
is a program on all devices: it waits for running computations, supports only arrays of one shape, and is five
times slower.
"""

import contextlib
import functools
import hashlib
import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import jax
import jaxlib.version
from jax._src import distributed
from jax.sharding import Mesh

from jetspec_jax.version import __version__

T = TypeVar("T")

#: The prefix of this package's keys in the store.
ROOT = "jetspec_jax"
# Longer values are compared by their digests.
_SHORT = 64
# Messages are deleted in blocks of this many turns, once all processes have read them.
_BLOCK = 256
# Milliseconds between checks for an interrupt.
_PATIENCE_MS = 1000
# Seconds that an error of the devices waits for another process to announce why it ended.
_LAST_WORDS = 3.0
# The message of a process that has ended, instead of its turn.
_END = "the end of the program"


class OutOfStep(RuntimeError):
    """The processes of a program made different calls."""


class ProgramEnded(OutOfStep):
    """Another process has ended its program."""


def spans(mesh: Mesh | None) -> bool:
    """Whether a mesh has devices of several processes, which must then make the same calls."""
    return mesh is not None and len(_processes_of(mesh)) > 1


def same_processes(mesh: Mesh, other: Mesh) -> bool:
    """Whether two meshes have devices of the same processes."""
    return _processes_of(mesh) == _processes_of(other)


def check_devices(mesh: Mesh) -> None:
    """Checks that a mesh has devices of this process only, or of all processes."""
    having = _processes_of(mesh)
    lacking = [process for process in range(jax.process_count()) if process not in having]
    if jax.process_index() in lacking or (len(having) > 1 and lacking):
        raise ValueError(
            f"the mesh of {mesh.devices.size} devices has none of process {', '.join(map(str, lacking))}, "
            f"and every process needs one: {jax.process_count()} processes have {jax.device_count()} devices"
        )


def is_first() -> bool:
    """Whether this is process 0, which prints and writes; does not initialise devices."""
    return distributed.global_state.process_id == 0


def agreed(value: T, about: str) -> T:
    """Broadcasts the first process's JSON value; all processes must describe it (``about``) alike."""
    return value if alone() else _STORE.exchange(about, value, everyone=False)[0]


def gathered(value: T, about: str) -> list[T]:
    """Gathers the values of all processes in all of them; see `agreed`."""
    return [value] if alone() else _STORE.exchange(about, value, everyone=True)


@contextmanager
def in_turn(about: str) -> Iterator[bool]:
    """Runs the block in the first process before all others, so that it can write files for them.

    Yields whether this is the first process. With one process it does not wait.
    """
    if not is_first():
        agreed(None, about)
    try:
        yield is_first()
    finally:
        if is_first():
            agreed(None, about)


def compare(parts: dict[str, Any], about: str, what: str) -> None:
    """Checks that all processes have the same versions, kinds of devices, and given values.

    Processes exchange digests, and the values only if these differ.

    The error, raised in every process, lists all differences.
    """
    texts = _brief({**_environment(), **parts})
    digest = hashlib.sha256(json.dumps(texts).encode()).hexdigest()
    if len(set(gathered(digest, about))) == 1:
        return
    each, wrong = gathered(texts, about), []
    for name, value in each[0].items():
        other = next((number for number, found in enumerate(each) if found.get(name) != value), None)
        if other is not None:
            values = value, str(each[other].get(name))
            shown = f" ({values[0]} and {values[1]})" if max(map(len, values)) <= _SHOWN else ""
            wrong.append(f"{name} of process 0 and process {other}{shown}")
    raise ValueError(f"all processes must make the same calls; {what} differs: {'; '.join(wrong)}")


def _brief(parts: dict[str, Any]) -> dict[str, str]:
    """Values as short texts, which are equal if the values are."""
    found = {}
    for name, value in parts.items():
        # Addresses in an object's repr differ between processes and are removed.
        text = value if isinstance(value, str) else re.sub(r" at 0x[0-9a-f]+", "", repr(value))
        found[name] = text if len(text) <= _SHORT else hashlib.sha256(text.encode()).hexdigest()[:16]
    return found


@contextmanager
def together(mesh: Mesh | None) -> Iterator[None]:
    """A context for work on several processes, whose errors usually come from another process."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not spans(mesh):
            raise
        # If another process has announced its end, this process ends during this sleep.
        time.sleep(_LAST_WORDS)
        raise RuntimeError(
            f"the devices of {jax.process_count()} processes stopped; one of these has ended, or cannot be "
            f"reached: {error}"
        ) from error


# Most characters of a value that is shown in an error.
_SHOWN = 80


@functools.cache
def _environment() -> dict[str, str]:
    """Versions and device kind, by name; they must be the same in all processes of a program."""
    return {
        "the version of jetspec_jax": __version__,
        "the version of JAX": jax.__version__,
        "the version of jaxlib": jaxlib.version.__version__,
        "the kind of device": jax.local_devices()[0].device_kind,
    }


@functools.cache
def _processes_of(mesh: Mesh) -> frozenset[int]:
    return frozenset(device.process_index for device in mesh.devices.flat)


def alone() -> bool:
    """Whether there is only one process; does not initialise devices."""
    return distributed.global_state.num_processes == 1


class _Store:
    """Messages in turns; turn t of process p has the key ``ROOT/said/<t // 256>/<t>/<p>``."""

    def __init__(self) -> None:
        self._turn = 0

    @property
    def _client(self) -> Any:
        return distributed.global_state.client

    def exchange(self, about: str, value: Any, *, everyone: bool) -> list[Any]:
        """The values of the first or of all processes. A turn that fails can be repeated."""
        process_id, store = distributed.global_state.process_id, self._client
        if process_id == 0 or everyone:
            self._send(store, process_id, about, value)
        processes = range(distributed.global_state.num_processes) if everyone else [0]
        values = [
            value if process == process_id else self._receive(store, process, about) for process in processes
        ]
        self._turn += 1
        if self._turn % _BLOCK == 0 and about != _DONE:
            # After this exchange no process reads older turns.
            self.exchange(_DONE, None, everyone=True)
            if process_id == 0:
                store.key_value_delete(f"{ROOT}/said/{self._turn // _BLOCK - 1}/")
        return values

    def end(self) -> None:
        """Announces the end of this process."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # the other processes have ended
            self._send(self._client, distributed.global_state.process_id, _END, None)

    def _send(self, store: Any, process_id: int, *message: Any) -> None:
        store.key_value_set(self._key(process_id), json.dumps(message), allow_overwrite=True)

    def _receive(self, store: Any, process: int, about: str) -> Any:
        theirs, value = json.loads(_wait_for(store, self._key(process)))
        if theirs != about:
            raise (ProgramEnded if theirs == _END else OutOfStep)(
                f"all processes must make the same calls: process {process} is at {theirs}, and process "
                f"{distributed.global_state.process_id} at {about}"
            )
        return value

    def _key(self, process: int) -> str:
        return f"{ROOT}/said/{self._turn // _BLOCK}/{self._turn}/{process}"


_DONE = "a block of turns"
_STORE = _Store()


def say_end() -> None:
    """Announces a regular end of this process."""
    _STORE.end()


def _wait_for(store: Any, key: str) -> str:
    """Waits for a key without a timeout: `jax.distributed` ends processes whose peers have died."""
    while True:
        try:
            return store.blocking_key_value_get(key, _PATIENCE_MS)
        except jax.errors.JaxRuntimeError as error:
            if not str(error).startswith("DEADLINE_EXCEEDED"):
                raise
