"""JetSpec in JAX: a draft head proposes a token tree, the target verifies it, the text stays its own."""

import importlib
from typing import TYPE_CHECKING, Any

from jetspec_jax.version import __version__ as __version__

if TYPE_CHECKING:
    from jetspec_jax import tree
    from jetspec_jax.async_llm import AsyncLLM, Delta
    from jetspec_jax.checkpoint.content import CheckpointError
    from jetspec_jax.checkpoint.loading import Head, Target, load_draft_head, load_target
    from jetspec_jax.decode.decoder import TreeDecoder
    from jetspec_jax.decode.proposer import DraftHeadProposer, Proposer
    from jetspec_jax.decode.state import DecodeState, DecodeWeights, RoundRecord, SlotSettings
    from jetspec_jax.device.compilation_cache import enable_compilation_cache
    from jetspec_jax.device.joining import join_processes
    from jetspec_jax.device.memory import DeviceMemoryError
    from jetspec_jax.engine.output import Completion
    from jetspec_jax.engine.request import DeadlinePassed, EngineFailed
    from jetspec_jax.engine.scheduler import QueueFull
    from jetspec_jax.generation import generate, generate_tree
    from jetspec_jax.inspect.forward import draft_logits, hidden_states, logits, tree_logits
    from jetspec_jax.llm import LLM
    from jetspec_jax.models import bind, register_family, weights_of
    from jetspec_jax.request_output import CompletionOutput, RequestOutput
    from jetspec_jax.sampling.params import SamplingParams
    from jetspec_jax.sampling.structured import StructuredOutputsParams

__all__ = [
    "LLM",
    "AsyncLLM",
    "CheckpointError",
    "Completion",
    "CompletionOutput",
    "DeadlinePassed",
    "DecodeState",
    "DecodeWeights",
    "Delta",
    "DeviceMemoryError",
    "DraftHeadProposer",
    "EngineFailed",
    "Head",
    "Proposer",
    "QueueFull",
    "RequestOutput",
    "RoundRecord",
    "SamplingParams",
    "SlotSettings",
    "StructuredOutputsParams",
    "Target",
    "TreeDecoder",
    "bind",
    "draft_logits",
    "enable_compilation_cache",
    "generate",
    "generate_tree",
    "hidden_states",
    "join_processes",
    "load_draft_head",
    "load_target",
    "logits",
    "register_family",
    "tree",
    "tree_logits",
    "weights_of",
]

# Where the names are. Each is imported when it is first used: JAX takes seconds, and a command that is only
# beginning answers an interrupt meanwhile.
_PLACES = {
    "jetspec_jax.async_llm": ("AsyncLLM", "Delta"),
    "jetspec_jax.checkpoint.content": ("CheckpointError",),
    "jetspec_jax.checkpoint.loading": ("Head", "Target", "load_draft_head", "load_target"),
    "jetspec_jax.decode.decoder": ("TreeDecoder",),
    "jetspec_jax.decode.proposer": ("DraftHeadProposer", "Proposer"),
    "jetspec_jax.decode.state": ("DecodeState", "DecodeWeights", "RoundRecord", "SlotSettings"),
    "jetspec_jax.device.compilation_cache": ("enable_compilation_cache",),
    "jetspec_jax.device.joining": ("join_processes",),
    "jetspec_jax.device.memory": ("DeviceMemoryError",),
    "jetspec_jax.engine.scheduler": ("QueueFull",),
    "jetspec_jax.engine.output": ("Completion",),
    "jetspec_jax.engine.request": ("DeadlinePassed", "EngineFailed"),
    "jetspec_jax.generation": ("generate", "generate_tree"),
    "jetspec_jax.inspect.forward": ("draft_logits", "hidden_states", "logits", "tree_logits"),
    "jetspec_jax.llm": ("LLM",),
    "jetspec_jax.request_output": ("CompletionOutput", "RequestOutput"),
    "jetspec_jax.models": ("bind", "register_family", "weights_of"),
    "jetspec_jax.sampling.params": ("SamplingParams",),
    "jetspec_jax.sampling.structured": ("StructuredOutputsParams",),
}
_HOMES = {name: place for place, names in _PLACES.items() for name in names}


def __getattr__(name: str) -> Any:
    """A name of `__all__`, imported."""
    if name == "tree":
        return importlib.import_module("jetspec_jax.tree")
    if name not in _HOMES:
        from jetspec_jax.vllm_names import IMPORTS

        if name in IMPORTS:
            # `from jetspec_jax import …` would drop the words of an AttributeError.
            raise ImportError(f"jetspec_jax has no {name}: {IMPORTS[name]}")
        raise AttributeError(f"module 'jetspec_jax' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
