"""Hugging Face safetensors to and from sharded Orbax, and from GGUF: ``python -m convert``, from a checkout.

A Hugging Face folder is what is published and what other engines load. An Orbax folder holds the same
parameters in the pytree of this library, in chunks that a mesh of devices reads in parallel::

    config.json       byte for byte, and so are the tokenizer's files and generation_config.json
    orbax.json        format, version, kind ("target" or "draft head"), the library's version
    weights/          an Orbax checkpoint (zarr3 in OCDBT) of the parameters

Both directions keep every bit: names, shapes, types and values. What a conversion leaves out is what no
parameter is made of, and it is listed: towers for images, heads that predict further tokens, a
``lm_head.weight`` that a target with tied embeddings stores all the same, the ``rotary_emb.inv_freq`` buffers
of older exporters, and files that are neither configs, weights nor the tokenizer's. So a folder that was
converted there and back holds exactly the tensors of the key tables, in their first form and under their
first prefix: experts that were fused may be written one by one, and what was MXFP4 is bfloat16.
Weights in FP8 stay FP8. The library's functions are `to_orbax`, `to_huggingface`, `to_fp8`, which quantises,
and `verify`; `convert.orbax_io` reads and writes the Orbax folders.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from convert.conversion import Conversion, to_huggingface, to_orbax
    from convert.quantizing import Rounding, to_fp8
    from convert.verification import Verification, verify

__all__ = [
    "Conversion",
    "Rounding",
    "Verification",
    "to_fp8",
    "to_huggingface",
    "to_orbax",
    "verify",
]

_PLACES = {
    "Rounding": "quantizing",
    "to_fp8": "quantizing",
    "Verification": "verification",
    "verify": "verification",
}


def __getattr__(name: str) -> Any:
    """A name of `__all__`, imported when it is first used: the command answers an interrupt meanwhile."""
    if name not in __all__:
        raise AttributeError(f"module 'convert' has no attribute {name!r}")
    place = _PLACES.get(name, "conversion")
    value = globals()[name] = getattr(importlib.import_module(f"convert.{place}"), name)
    return value
