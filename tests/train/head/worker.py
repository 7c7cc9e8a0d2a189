"""Trains tiny heads in a process of its own: ``python -m tests.train.head.worker SETTINGS``, in JSON.

Keys of the settings: "data", the documents' folder; "runs", pairs of a work folder and of changes to the tiny
recipe; and, where need be, "devices", "die" as ``{"write": 3}``, "process" as ``[index, count, port]``, and
"cache", a folder for compiled programs. Each run leaves ``layout-N.json``, N being the process's number: the
shapes of its arrays and of their parts on a device.
"""

import json
import os
import signal
import sys
from pathlib import Path

import jax


def main(settings):
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_num_cpu_devices", settings.get("devices", 1))
    if "cache" in settings:
        jax.config.update("jax_enable_compilation_cache", True)
        jax.config.update("jax_compilation_cache_dir", settings["cache"])
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    if "process" in settings:
        index, count, port = settings["process"]
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"localhost:{port}", count, index)
    # Only now: what is imported may look at the devices.
    from tests.train.head.tiny import RECIPE, changed, target
    from train.head.training import train_head
    from train.loop.stages import Deadline

    for place, call in settings.get("die", {}).items():
        die_in(place, call)
    layouts = watch_layouts()
    for work, changes in settings["runs"]:
        train_head(Path(work), changed(RECIPE, **changes), target(), Path(settings["data"]), Deadline())
        path = Path(work) / f"layout-{jax.process_index()}.json"
        path.write_text(json.dumps(layouts), encoding="utf-8")


def watch_layouts():
    """A mapping that always holds how the arrays of the last step lie."""
    from train.loop.trainer import Loop

    layouts, real = {}, Loop.advance

    def watched(self, state, frozen, batch):
        state, metrics = real(self, state, frozen, batch)
        arrays = {
            "weights": state.weights,
            "optimizer": state.optimizer,
            "frozen": frozen,
            "metrics": metrics,
        }
        layouts.clear()
        for path, x in jax.tree_util.tree_flatten_with_path(arrays)[0]:
            layouts[jax.tree_util.keystr(path)] = [x.shape, x.sharding.shard_shape(x.shape)]
        layouts["programs"] = self.step._cache_size()
        return state, metrics

    Loop.advance = watched
    return layouts


def die_in(place, call):
    """Lets the process be killed at the end of the n-th call of something."""
    from train.head.evaluation import HeadEvaluator
    from train.loop import log
    from train.loop.checkpoints import Checkpoints

    owner, name = {
        "write": (log._Files, "write"),
        "evaluate": (HeadEvaluator, "__call__"),
        # These write in the background: the process is gone before that is done.
        "save": (Checkpoints, "save"),
        "save_best": (Checkpoints, "save_best"),
    }[place]
    real, calls = getattr(owner, name), []

    def dying(*arguments, **keywords):
        calls.append(1)
        result = real(*arguments, **keywords)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, dying)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
