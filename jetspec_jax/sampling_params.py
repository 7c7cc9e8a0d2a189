"""The sampling parameters, under the name of vLLM's module."""

from typing import NoReturn

from jetspec_jax.sampling.params import SamplingParams as SamplingParams
from jetspec_jax.sampling.structured import StructuredOutputsParams as StructuredOutputsParams
from jetspec_jax.vllm_names import IMPORTS


def __getattr__(name: str) -> NoReturn:
    """Raises ImportError for a name of vLLM's, with what there is instead."""
    if name in IMPORTS:
        raise ImportError(f"{__name__} has no {name}: {IMPORTS[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
