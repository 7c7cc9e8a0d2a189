"""A custom family of targets: Qwen3 with parallel blocks, attention beside the feed-forward.

``python examples/add_a_family.py``
"""

import argparse
import shutil
import tempfile
from pathlib import Path

from jetspec_jax import LLM, SamplingParams, register_family
from jetspec_jax.config import qwen3
from jetspec_jax.demo import DEMO_TARGET
from jetspec_jax.models import decoder_layer
from jetspec_jax.models.qwen3 import Qwen3

parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
parser.add_argument("--max-tokens", type=int, default=32)
params = SamplingParams(max_tokens=parser.parse_args().max_tokens)


class Parallel(Qwen3):
    """The model; ``KEYS``, its table of tensors, is Qwen3's."""

    class LAYER(decoder_layer.DecoderLayer):
        """A layer whose two blocks read the same stream."""

        def feed(self, x, attended):
            """The stream and what the blocks add to it."""
            return x, attended + self.mlp(self.post_attention_layernorm(x))


register_family("parallel_qwen3", read=qwen3.read, module=Parallel)
with tempfile.TemporaryDirectory() as folder:
    # A checkpoint of the family: the demo's weights. They are not trained for it, so the text is poor.
    shutil.copytree(DEMO_TARGET, folder, dirs_exist_ok=True)
    config = Path(folder, "config.json")
    config.write_text(config.read_text().replace('"qwen3"', '"parallel_qwen3"'))
    llm = LLM(folder, tokenizer="demo")
print(f"{llm.target} writes{llm.generate('def read_lines(path):', params)[0].text}")
