"""JetSpec in JAX: a draft head proposes a token tree, the target verifies it, the text stays its own."""

from jetspec_jax import tree
from jetspec_jax.checkpoint import Head, Target, load_draft_head, load_target
from jetspec_jax.compilation_cache import enable_compilation_cache
from jetspec_jax.completion import Completion
from jetspec_jax.decode import TreeDecoder
from jetspec_jax.forward import draft_logits, logits, tree_logits
from jetspec_jax.generate import generate, generate_tree
from jetspec_jax.llm import LLM
from jetspec_jax.memory import DeviceMemoryError
from jetspec_jax.proposer import DraftHeadProposer, Proposer
from jetspec_jax.sampling import SamplingParams
from jetspec_jax.state import DecodeState, DecodeWeights, RoundRecord, SlotSettings

__all__ = [
    "LLM",
    "Completion",
    "DecodeState",
    "DecodeWeights",
    "DeviceMemoryError",
    "DraftHeadProposer",
    "Head",
    "Proposer",
    "RoundRecord",
    "SamplingParams",
    "SlotSettings",
    "Target",
    "TreeDecoder",
    "draft_logits",
    "enable_compilation_cache",
    "generate",
    "generate_tree",
    "load_draft_head",
    "load_target",
    "logits",
    "tree",
    "tree_logits",
]

__version__ = "0.1.0"
