"""Hugging Face safetensors to and from sharded Orbax, and from GGUF: ``python -m convert``, from a checkout.

A Hugging Face folder is what is published and what other engines load. An Orbax folder holds the same
parameters in the pytree of this library, in chunks that a mesh of devices reads in parallel::

    config.json       byte for byte, and so are the tokenizer's files and generation_config.json
    orbax.json        format, version, kind ("target" or "draft head"), the library's version
    weights/          an Orbax checkpoint (zarr3 in OCDBT) of the parameters

Both directions keep every bit: names, shapes, types and values. A conversion leaves out tensors without a
parameter, and lists them: image towers, heads that predict further tokens, a ``lm_head.weight`` stored beside
tied embeddings, and the ``rotary_emb.inv_freq`` buffers of older exporters. It also leaves out files that are
neither configs, weights nor the tokenizer's. So a folder converted there and back has exactly the tensors of
the key tables, in their first form and with their first prefix: fused experts may be written one by one, and
MXFP4 becomes bfloat16. Weights in FP8 stay FP8. The library's functions are `to_orbax`, `to_huggingface`,
`to_fp8`, which quantises, and `verify`; `convert.orbax_io` reads and writes the Orbax folders.
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
    """Imports a name of `__all__` when it is first used, so that the command can answer interrupts early."""
    if name not in __all__:
        raise AttributeError(f"module 'convert' has no attribute {name!r}")
    place = _PLACES.get(name, "conversion")
    value = globals()[name] = getattr(importlib.import_module(f"convert.{place}"), name)
    return value
