"""Several processes that run one program: how they meet, and how they tell each other things.

All of them make the same calls in the same order. What may differ between them, a clock, a drawn number,
what the caller lets go of, comes from the first process.

They talk through the key-value store of `jax.distributed`. JAX gives it no public name; Orbax uses it as this
file does, and it is the same from JAX 0.10 to 0.12. The public `multihost_utils.broadcast_one_to_all` is a
program of all devices instead: it waits for what they are computing, takes arrays of one shape only, and is
five times slower.
"""

import contextlib
import functools
import hashlib
import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import jaxlib.version
from jax._src import distributed
from jax.sharding import Mesh

from jetspec_jax.version import __version__

T = TypeVar("T")

#: Where everything of this package stands in the store.
ROOT = "jetspec_jax"
# Longer values are compared by their digests.
_SHORT = 64
# Turns whose messages are removed together, once all processes have read them.
_BLOCK = 256
# Between two looks at whether an interrupt has come.
_PATIENCE_MS = 1000
# How long an error waits for another process to say why it ended, in seconds.
_LAST_WORDS = 3.0
# Stands for the turn of a process that has ended.
_END = "the end of the program"


@runtime_checkable
class Followed(Protocol):
    """Something that all processes keep until the first lets go of it.

    Attributes:
        cancelled: Whether it has; set in all processes at the same message.
    """

    cancelled: bool

    @property
    def unwanted(self) -> bool:
        """Whether this process needs it no longer; only the first is asked."""
        ...


class OutOfStep(RuntimeError):
    """Processes of one program do different things."""


def spans(mesh: Mesh | None) -> bool:
    """Whether a mesh has devices of several processes, which then have to act alike."""
    return mesh is not None and len(_processes_of(mesh)) > 1


def same_processes(mesh: Mesh, other: Mesh) -> bool:
    """Whether two meshes have devices of the same processes."""
    return _processes_of(mesh) == _processes_of(other)


def check_devices(mesh: Mesh) -> None:
    """Checks that this process has a device of a mesh, and if others have some, that all do.

    Raises:
        ValueError: It is not so.
    """
    having = _processes_of(mesh)
    lacking = [process for process in range(jax.process_count()) if process not in having]
    if jax.process_index() in lacking or (len(having) > 1 and lacking):
        raise ValueError(
            f"the mesh of {mesh.devices.size} devices has none of process {', '.join(map(str, lacking))}, "
            f"and every process needs one: {jax.process_count()} processes have {jax.device_count()} devices"
        )


def is_first() -> bool:
    """Whether this is the process that prints and writes; asks no device."""
    return distributed.global_state.process_id == 0


def agreed(value: T, about: str) -> T:
    """The first process's value, in all processes.

    Args:
        value: Of JSON's types.
        about: What it is, the same in all processes.

    Raises:
        OutOfStep: Another process is about something else.
    """
    return value if alone() else _STORE.exchange(about, value, everyone=False)[0]


def gathered(value: T, about: str) -> list[T]:
    """The values of all processes, in all of them; see `agreed`."""
    return [value] if alone() else _STORE.exchange(about, value, everyone=True)


def all_agree(value: bool, about: str) -> bool:
    """Whether the value is true in all processes."""
    return all(gathered(value, about))


@contextmanager
def in_turn(about: str) -> Iterator[bool]:
    """Runs the block in the first process before all others, so that it can write files for them.

    Yields whether this is the first process. With one process there is nobody to wait for.
    """
    if not is_first():
        agreed(None, about)
    try:
        yield is_first()
    finally:
        if is_first():
            agreed(None, about)


def follow(thing: Followed) -> None:
    """Cancels a thing in all processes when the first lets go of it; all name the same things in turn."""
    _STORE.follow(thing)


def check_alike(said: list[dict[str, str]], what: str) -> None:
    """Checks that the processes want the same.

    Args:
        said: What must be equal, by name, as `gathered` found it; short values are shown.
        what: Of what these are parts.

    Raises:
        ValueError: They differ, in every process; all that differs is named.
    """
    wrong = []
    for name, own in said[0].items():
        other = next((number for number, each in enumerate(said) if each.get(name) != own), None)
        if other is not None:
            values = own, str(said[other].get(name))
            shown = f" ({values[0]} and {values[1]})" if max(map(len, values)) <= _SHOWN else ""
            wrong.append(f"{name} of process 0 and process {other}{shown}")
    if wrong:
        raise ValueError(f"all processes must make the same calls; {what} differs: {'; '.join(wrong)}")


def compare(parts: dict[str, Any], about: str, what: str) -> None:
    """Checks that all processes have the same versions, kinds of devices and parts of something.

    Args:
        parts: What must be equal, by name.
        about: As for `agreed`.
        what: Of what these are parts.

    Raises:
        ValueError: They differ, in every process; all that differs is named.
    """
    check_alike(gathered(brief({**environment(), **parts}), about), what)


def brief(parts: dict[str, Any]) -> dict[str, str]:
    """Values as short texts, equal in all processes if the values are."""
    found = {}
    for name, value in parts.items():
        # Objects that show their address are told apart by what else they show.
        text = value if isinstance(value, str) else re.sub(r" at 0x[0-9a-f]+", "", repr(value))
        found[name] = text if len(text) <= _SHORT else hashlib.sha256(text.encode()).hexdigest()[:16]
    return found


@contextmanager
def together(mesh: Mesh | None) -> Iterator[None]:
    """What the devices of several processes do; an error of theirs is likely one of another process.

    Raises:
        RuntimeError: They failed.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not spans(mesh):
            raise
        # If another process has said why it ends, this one ends here.
        time.sleep(_LAST_WORDS)
        raise RuntimeError(
            f"the devices of {jax.process_count()} processes stopped; one of these has ended, or cannot be "
            f"reached: {error}"
        ) from error


# Characters of a value that is shown.
_SHOWN = 80


def environment() -> dict[str, str]:
    """What programs are compiled with and for, by name: processes that run one must have the same."""
    return {
        "the version of jetspec_jax": __version__,
        "the version of JAX": jax.__version__,
        "the version of jaxlib": jaxlib.version.__version__,
        "the version of llguidance": _version("llguidance"),  # each makes the masks of grammars itself
        "the kind of device": jax.local_devices()[0].device_kind,
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


@functools.cache
def _processes_of(mesh: Mesh) -> frozenset[int]:
    return frozenset(device.process_index for device in mesh.devices.flat)


def alone() -> bool:
    """Whether there are no other processes; asks no device."""
    return distributed.global_state.num_processes == 1


class _Store:
    """Messages by turns; turn t of process p stands under ``ROOT/said/<t // 256>/<t>/<p>``."""

    def __init__(self) -> None:
        self._turn = 0
        self._followed: dict[int, Followed] = {}
        self._count = 0

    @property
    def _client(self) -> Any:
        return distributed.global_state.client

    def follow(self, thing: Followed) -> None:
        self._followed[self._count] = thing
        self._count += 1

    def exchange(self, about: str, value: Any, *, everyone: bool) -> list[Any]:
        """The values of the first or of all processes. A turn that fails may be had again."""
        mine, store = distributed.global_state.process_id, self._client
        if mine == 0 or everyone:
            self._say(store, mine, about, value)
        processes = range(distributed.global_state.num_processes) if everyone else [0]
        values = [value if process == mine else self._hear(store, process, about) for process in processes]
        self._turn += 1
        if self._turn % _BLOCK == 0 and about != _DONE:
            # After this turn nobody reads an older one any more.
            self.exchange(_DONE, None, everyone=True)
            if mine == 0:
                store.key_value_delete(f"{ROOT}/said/{self._turn // _BLOCK - 1}/")
        return values

    def end(self) -> None:
        """Says that this process does nothing more; what the others follow it in is closed."""
        mine = distributed.global_state.process_id
        closed = list(self._followed) if mine == 0 else []
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # nobody is left to be told
            self._set(self._client, mine, _END, None, closed)

    def _say(self, store: Any, mine: int, about: str, value: Any) -> None:
        closed = []
        if mine == 0:
            closed = [number for number, thing in self._followed.items() if thing.unwanted]
        self._set(store, mine, about, value, closed)
        self._close(closed)

    def _set(self, store: Any, mine: int, *message: Any) -> None:
        store.key_value_set(self._key(mine), json.dumps(message), allow_overwrite=True)

    def _hear(self, store: Any, process: int, about: str) -> Any:
        theirs, value, closed = json.loads(_wait_for(store, self._key(process)))
        self._close(closed)
        if theirs != about:
            raise OutOfStep(
                f"all processes must make the same calls: process {process} is at {theirs}, and process "
                f"{distributed.global_state.process_id} at {about}"
            )
        return value

    def _close(self, numbers: list[int]) -> None:
        for number in numbers:
            if (thing := self._followed.pop(number, None)) is not None:
                thing.cancelled = True

    def _key(self, process: int) -> str:
        return f"{ROOT}/said/{self._turn // _BLOCK}/{self._turn}/{process}"


_DONE = "a block of turns"
_STORE = _Store()


def say_end() -> None:
    """Tells the others that this process has ended as it should."""
    _STORE.end()


def _wait_for(store: Any, key: str) -> str:
    """Waits for ever: `jax.distributed` ends processes whose peers have died."""
    while True:
        try:
            return store.blocking_key_value_get(key, _PATIENCE_MS)
        except jax.errors.JaxRuntimeError as error:
            if not str(error).startswith("DEADLINE_EXCEEDED"):
                raise
