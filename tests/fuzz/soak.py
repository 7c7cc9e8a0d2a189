"""Minutes of mixed use of one target: threads, streams, cancellations, interrupts. See ``--help``.

Every output is compared with what plain decoding alone gives. Now and then all threads pause: then nothing
may be left in the engine, and memory is measured without the compiled programs.
"""

import argparse
import collections
import ctypes
import gc
import json
import random
import signal
import sys
import threading
import time
from pathlib import Path

import jax
from tqdm import tqdm

from jetspec_jax.engine.engine import CLOSED
from tests.fuzz.scenes import Scene

# Memory is compared with the most of the first part of the time, in which it settles.
SETTLING = 1 / 3
MOST_GROWTH = 100 * 2**20
# Seconds between two pauses, at most a sixth of the time; and between two interrupts, on average.
PAUSE, INTERRUPT = 60.0, 3.0


class Soak:
    """Threads that use a scene until they are told to pause; the main thread is interrupted meanwhile."""

    def __init__(self, scene: Scene, threads: int, seed: int):
        """Nothing runs yet."""
        self.scene, self.threads, self.seed = scene, threads, seed
        self.done: collections.Counter[str] = collections.Counter()
        self.errors: list[str] = []

    def spell(self, seconds: float) -> None:
        """Uses the target from all threads for a while, and checks it."""
        end = time.monotonic() + seconds
        others = [threading.Thread(target=self._use, args=(end, number)) for number in range(self.threads)]
        pest = threading.Thread(target=self._interrupt, args=(end,))
        for thread in others:
            thread.start()
        try:
            pest.start()
            self._use(end, self.threads)
        except KeyboardInterrupt:  # between two calls
            self.done["interrupted"] += 1
        self._outlast(pest)
        for thread in others:
            thread.join()
        self.scene.check(random.Random(self.seed))

    def _use(self, end: float, number: int) -> None:
        rng = random.Random(f"{self.seed} {number} {end}")
        while time.monotonic() < end and not self.errors:
            act = rng.choice(self.scene.acts)
            try:
                act(rng)
                self.done[act.__name__] += 1
            except KeyboardInterrupt:
                self.done["interrupted"] += 1
            except RuntimeError as error:
                # A stream that shared its engine with an interrupted call is told so.
                if str(error) != CLOSED:
                    self.errors.append(repr(error))
                self.done["lost"] += 1
            except BaseException as error:
                self.errors.append(repr(error))

    def _interrupt(self, end: float) -> None:
        rng = random.Random(f"{self.seed} {end}")
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(left, rng.expovariate(1 / INTERRUPT)))
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            self.done["signals"] += 1

    def _outlast(self, pest: threading.Thread) -> None:
        """Waits for the last signal."""
        while pest.is_alive():
            try:
                pest.join()
                time.sleep(0.1)
            except KeyboardInterrupt:
                self.done["interrupted"] += 1


def resident_bytes() -> int:
    """Memory of this process, without compiled programs and what the C library keeps for later."""
    jax.clear_caches()
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def main() -> None:
    """Prints one JSON object; its exit code is 1 where anything was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=15, help="how long (default: 15)")
    parser.add_argument("--threads", type=int, default=3, help="beside the main one (default: 3)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    # Also where whoever started this ignores it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    soak = Soak(Scene(options.seed), options.threads, options.seed)
    seconds = 60 * options.minutes
    started, memory = time.monotonic(), []
    with tqdm(total=round(seconds), unit=" s", disable=None) as bar:
        while (gone := time.monotonic() - started) < seconds and not soak.errors:
            soak.spell(min(PAUSE, seconds / 6, seconds - gone))
            memory.append((time.monotonic() - started, resident_bytes()))
            bar.update(round(min(memory[-1][0], seconds)) - bar.n)
    settled = max(size for when, size in memory if when <= max(SETTLING * seconds, memory[0][0]))
    growth = max(size for _, size in memory) - settled
    fine = not soak.errors and growth <= MOST_GROWTH
    report = {
        "minutes": round((time.monotonic() - started) / 60, 2),
        "seed": options.seed,
        "threads": options.threads + 1,
        "calls": dict(sorted(soak.done.items())),
        "errors": soak.errors,
        "growth_mib": round(growth / 2**20, 1),
        "memory_mib": [[round(when), round(size / 2**20)] for when, size in memory],
        "passed": fine,
    }
    print(json.dumps(report))
    sys.exit(not fine)


if __name__ == "__main__":
    main()
