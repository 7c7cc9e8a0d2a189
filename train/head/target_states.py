"""The target's states of all training windows, computed once and kept on disk.

A folder holds shards of consecutive windows: ``00000.states``, the states of the real tokens of its windows,
one window after the other, and ``00000.json``, which is written after it and describes it. Shapes: B windows
of T tokens, M model size, F tap size.
"""

import hashlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Int, Shaped

from jetspec_jax.checkpoint.files import replacing, write_json
from jetspec_jax.config import read_json
from jetspec_jax.progress import Progress
from train.data.windows import Window, Windows
from train.loop.stages import Deadline

#: Windows per shard; an interrupted run computes its unfinished shard again.
SHARD_WINDOWS = 64

#: Maps a batch of windows to their states, ``[B, T, M + F]``.
Compute = Callable[[Mapping[str, np.ndarray]], Shaped[np.ndarray, "B T X"]]


def check_bound(most_gib: float) -> None:
    """Checks the bound as far as possible before the windows are known.

    Raises:
        ValueError: The bound is not positive, or there are several processes.
    """
    if not most_gib > 0:
        raise ValueError(f"--cache-target-states must be above 0 GiB, not {most_gib:g}")
    if jax.process_count() > 1:
        raise ValueError(
            f"--cache-target-states is for one process, not {jax.process_count()}; train without it"
        )


class TargetStates:
    """A grain source of windows with the target's states under "states".

    The states of padding are zeros; no block reads them.

    Attributes:
        windows: The windows; their number and order must not change.
        bytes: Size of all states.
    """

    def __init__(self, folder: Path, windows: Windows, width: int, dtype: np.dtype[Any]):
        """Computes only the size; reads and writes no file.

        Args:
            folder: The folder of the shards, in a work folder that one recipe and one target share.
            width: Numbers for each token, M + F.
            dtype: Their type.
        """
        self._folder, self.windows, self._width, self._dtype = folder, windows, width, dtype
        self.bytes = windows.contents.tokens * width * dtype.itemsize
        self._edges: dict[int, Int[np.ndarray, "n"]] = {}

    def check(self, most_gib: float) -> str:
        """Compares the size with the bound and with the free disk.

        Returns:
            A line that announces the size.

        Raises:
            ValueError: As by `check_bound`, or it does not fit: the message has both sizes.
        """
        check_bound(most_gib)
        needs = f"the target's states of {self.windows.contents.tokens:,} tokens take {_gib(self.bytes)}"
        if self.bytes > most_gib * 2**30:
            raise ValueError(
                f"{needs}, and --cache-target-states allows {most_gib:g} GiB; allow more, or train without"
            )
        written = sum(path.stat().st_size for path in self._folder.glob("*.states"))
        existing = next(place for place in (self._folder, *self._folder.parents) if place.exists())
        free = shutil.disk_usage(existing).free
        if self.bytes - written > free:
            raise ValueError(
                f"{needs}, of which {_gib(written)} are written, and {self._folder} has {_gib(free)} free; "
                "make room, or train without --cache-target-states"
            )
        return f"{needs} in {self._folder}, where {_gib(free)} are free"

    def make(self, compute: Compute, batch: int, deadline: Deadline) -> None:
        """Computes all missing shards, and replaces damaged shards and shards of other windows.

        Args:
            compute: Computes the states of a batch.
            batch: Windows per batch; the last batch is padded with empty windows.
            deadline: Checked before each shard.

        Raises:
            OutOfTime: The deadline passed; call again to resume.
            OSError: A shard cannot be written.
            ValueError: A shard of the documents is damaged.
        """
        count = -(-len(self.windows) // SHARD_WINDOWS)
        with Progress(total=count, desc="target states", unit=" shards", mininterval=2) as bar:
            for number in range(count):
                first = number * SHARD_WINDOWS
                indices = range(first, min(first + SHARD_WINDOWS, len(self)))
                windows = [self.windows[index] for index in indices]
                made_of = self._made_of(windows)
                if not self._finished(number, made_of):
                    deadline.check(f"target states: {number} of {count} shards are written")
                    self._write(number, windows, made_of, compute, batch)
                self._edges[number] = np.cumsum([0, *(int(window["real"]) for window in windows)])
                bar.update(1)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> Window:
        """A window with its states; `make` must have run.

        Raises:
            IndexError: The index is out of range.
            ValueError: A shard is damaged.
        """
        window = self.windows[index]
        number, place = divmod(index, SHARD_WINDOWS)
        begin, end = self._edges[number][place : place + 2].tolist()
        row = self._width * self._dtype.itemsize
        # As bytes, because NumPy's files know no bfloat16.
        read = np.fromfile(self._paths(number)[0], np.uint8, (end - begin) * row, offset=begin * row)
        states = np.zeros((self.windows.window, self._width), self._dtype)
        states[: end - begin] = read.view(self._dtype).reshape(end - begin, self._width)
        return {**window, "states": states}

    def _paths(self, number: int) -> tuple[Path, Path]:
        return self._folder / f"{number:05d}.states", self._folder / f"{number:05d}.json"

    def _made_of(self, windows: Sequence[Window]) -> dict[str, Any]:
        """What a shard's states depend on, except the target.

        The dtype is included because "auto" resolves differently on other devices.
        """
        digest = hashlib.sha256()
        for window in windows:
            for part in (window["tokens"], window["real"], window.get("starts")):
                digest.update(b"" if part is None else part.tobytes())
        return {"windows": digest.hexdigest(), "width": self._width, "dtype": self._dtype.name}

    def _finished(self, number: int, made_of: Mapping[str, Any]) -> bool:
        path, described = self._paths(number)
        if not described.exists():
            return False
        try:
            found = read_json(described)
            if {name: found.get(name) for name in made_of} != made_of:
                raise ValueError("it has states of other windows or of another type")
            with path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != found.get("sha256"):
                    raise ValueError("its checksum is another")
            return True
        except (OSError, ValueError) as error:
            print(f"{path} cannot be used ({error}) and is computed again", flush=True)
            described.unlink()
            return False

    def _write(
        self,
        number: int,
        windows: Sequence[Window],
        made_of: Mapping[str, Any],
        compute: Compute,
        batch: int,
    ) -> None:
        path, described = self._paths(number)
        digest = hashlib.sha256()
        with replacing(path) as partial, partial.open("wb") as file:
            for start in range(0, len(windows), batch):
                some = windows[start : start + batch]
                rows = [*some, *[_empty(some[0])] * (batch - len(some))]
                states = compute({name: np.stack([row[name] for row in rows]) for name in some[0]})
                for window, tokens in zip(some, states, strict=False):
                    data = tokens[: int(window["real"])].astype(self._dtype).tobytes()
                    file.write(data)
                    digest.update(data)
        write_json(described, {**made_of, "sha256": digest.hexdigest()})


def _empty(window: Window) -> dict[str, np.ndarray]:
    return {name: np.zeros_like(part) for name, part in window.items()}


def _gib(size: int) -> str:
    return f"{size / 2**30:.3g} GiB"
