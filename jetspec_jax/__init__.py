"""JetSpec in JAX: a draft head proposes a token tree, the target verifies it, the text stays its own."""

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
from jetspec_jax.engine.line import QueueFull
from jetspec_jax.engine.output import Completion
from jetspec_jax.engine.request import DeadlinePassed, EngineFailed
from jetspec_jax.generate import generate, generate_tree
from jetspec_jax.inspect.forward import draft_logits, logits, tree_logits
from jetspec_jax.llm import LLM
from jetspec_jax.sampling.params import SamplingParams
from jetspec_jax.sampling.structured import StructuredOutputsParams

__all__ = [
    "LLM",
    "AsyncLLM",
    "CheckpointError",
    "Completion",
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
    "RoundRecord",
    "SamplingParams",
    "SlotSettings",
    "StructuredOutputsParams",
    "Target",
    "TreeDecoder",
    "draft_logits",
    "enable_compilation_cache",
    "generate",
    "generate_tree",
    "join_processes",
    "load_draft_head",
    "load_target",
    "logits",
    "tree",
    "tree_logits",
]

__version__ = "0.2.0"
