"""A Hugging Face ``config.json``, read and validated into frozen dataclasses.

Two dialects are supported: the older (``rope_theta``, ``rope_scaling``, ``torch_dtype``) and the one that
transformers 5 writes (``rope_parameters``, ``dtype``). Each file reads the keys of one model family.
"""

from jetspec_jax.config.draft_head import (
    check_head_fits,
    default_tap_layers,
    parse_config,
    parse_draft_head_config,
)
from jetspec_jax.config.fields import IGNORE_OPTION, read_json
from jetspec_jax.config.geometry import (
    SCALE_BANDS,
    DraftHeadConfig,
    DraftScales,
    Experts,
    LayerConfig,
    ModelConfig,
    Recurrence,
    Rope,
    SelectorConfig,
)
from jetspec_jax.config.head_dialects import MAX_SELECTED, causality_by_engine, dialect_of
from jetspec_jax.config.target import is_draft_head, parse_eos_token_ids, parse_model_config
