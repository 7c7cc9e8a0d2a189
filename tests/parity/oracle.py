"""Random tiny Qwen3 models of transformers, their checkpoints in both dialects, trees, and comparison."""

import json

import jax.numpy as jnp
import numpy as np
import torch
from safetensors.numpy import load_file
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from jetspec_jax.tree import TokenTree
from tests.families import step_by_step
from tests.float64 import Rounding, assert_rounded, reference_of

TOLERANCE = 1e-4
VOCAB = 61

# Head sizes that are not hidden / heads, grouped queries, an uncommon rotary base.
SHAPES = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "wide heads": {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16, "rms_norm_eps": 1e-5},
    "one KV head": {"num_key_value_heads": 1, "num_hidden_layers": 2, "tie_word_embeddings": True},
    "sliding": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
}


def random_model(shape="untied", seed=0, **changes):
    """An evaluated float32 model whose every parameter is random, norm weights included."""
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    }
    config = Qwen3Config(**{**settings, **SHAPES[shape], **changes})
    # Eager attention takes any mask as it is.
    model = Qwen3ForCausalLM._from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = 0.2 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + noise if name.endswith("norm.weight") else noise)
    return model


def save_newer(model, folder, **settings):
    """As this version of transformers saves it."""
    model.save_pretrained(folder, **settings)
    raw = json.loads((folder / "config.json").read_text())
    assert "rope_parameters" in raw
    assert "rope_theta" not in raw
    return folder


def save_older(model, folder):
    """As version 4 of transformers saved it; the config is written by hand."""
    config = model.config
    copied = (
        "head_dim",
        "hidden_size",
        "intermediate_size",
        "max_position_embeddings",
        "max_window_layers",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "rms_norm_eps",
        "sliding_window",
        "tie_word_embeddings",
        "use_sliding_window",
        "vocab_size",
    )
    raw = {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "model_type": "qwen3",
        "rope_scaling": None,
        "rope_theta": config.rope_parameters["rope_theta"],
        "torch_dtype": "float32",
        "transformers_version": "4.51.0",
        "use_cache": True,
        **{key: getattr(config, key) for key in copied},
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def random_ids(seed, *shape):
    return np.random.default_rng(seed).integers(0, VOCAB, shape).astype(np.int32)


@torch.no_grad()
def oracle_logits(model, ids, **settings):
    """float32 logits of whole sequences (or whatever a mask makes of them), at once and without a cache."""
    out = model(torch.from_numpy(np.asarray(ids, np.int64)), use_cache=False, **settings)
    return out.logits.float().numpy()


def assert_close(ours, theirs, tolerance=TOLERANCE):
    """Equal within the tolerance, of logits that are large enough for it to mean something."""
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    assert ours.shape == theirs.shape
    assert theirs.std() > 0.5
    assert np.abs(ours - theirs).max() < tolerance


def random_trees(seed, num_nodes, *, max_depth=7):
    """Trees with any parents, of ``num_nodes[b]`` nodes each, padded to the largest; as deep as allowed."""
    rng = np.random.default_rng(seed)
    size = max(num_nodes)
    tokens, depths = np.zeros((2, len(num_nodes), size), np.int32)
    parents = np.full((len(num_nodes), size), -1, np.int32)
    for b, count in enumerate(num_nodes):
        tokens[b, :count] = rng.integers(0, VOCAB, count)
        for node in range(1, count):
            open_nodes = np.flatnonzero(depths[b, :node] < max_depth)
            deepest = open_nodes[np.argmax(depths[b, open_nodes])]
            parents[b, node] = deepest if rng.random() < 0.5 else rng.choice(open_nodes)
            depths[b, node] = depths[b, parents[b, node]] + 1
        assert depths[b].max() == max_depth
    valid = np.arange(size) < np.array(num_nodes)[:, None]
    return TokenTree(
        tokens=jnp.asarray(tokens),
        parents=jnp.asarray(parents),
        depths=jnp.asarray(depths),
        scores=jnp.where(jnp.asarray(valid), jnp.float32(0), -jnp.inf),
        num_nodes=jnp.asarray(num_nodes, jnp.int32),
    )


def path_to(parents, node):
    """Nodes from the root to ``node``."""
    path = []
    while node >= 0:
        path.append(int(node))
        node = parents[node]
    return path[::-1]


def in_one_forward(model, prefix, tree):
    """transformers over prefix and tree together: a 4-D ancestor mask, and depths in place of positions.

    The mask stays explicit: without one, repeated positions are taken for packed sequences.
    """
    batch, length = prefix.shape
    parents, depths = np.asarray(tree.parents), np.asarray(tree.depths)
    size = length + parents.shape[1]
    sees = np.broadcast_to(np.tri(size, dtype=bool), (batch, size, size)).copy()
    sees[:, length:, length:] = False
    for b in range(batch):
        for node in range(parents.shape[1]):
            sees[b, length + node, [length + i for i in path_to(parents[b], node)]] = True
    positions = np.concatenate(
        [np.broadcast_to(np.arange(length), prefix.shape), length + depths], axis=1, dtype=np.int64
    )
    # A window goes by positions, not by places in the sequence.
    config = model.config.get_text_config()
    near = positions[:, :, None] - positions[:, None, :] < (getattr(config, "sliding_window", None) or size)

    def additive(mask):
        lowest = torch.finfo(torch.float32).min
        return torch.where(torch.from_numpy(mask[:, None]), 0.0, lowest)

    mask = {"full_attention": additive(sees), "sliding_attention": additive(sees & near)}
    theirs = oracle_logits(
        model,
        np.concatenate([prefix, tree.tokens], axis=1),
        # Models whose layers are all of one type take one mask.
        attention_mask=mask if getattr(config, "layer_types", None) else mask["sliding_attention"],
        position_ids=torch.from_numpy(positions),
    )
    return theirs[:, length:]


def recurrent_reference(folder, ids, parents=None):
    """Logits ``[B, T, V]`` of a saved Qwen3.5 or Qwen3-Next in float64, of sequences or of one tree."""
    raw = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    tensors = {name.replace("model.language_model.", "model."): own for name, own in tensors.items()}
    samples = step_by_step.logits(raw.get("text_config", raw), tensors, ids, Rounding(), parents)
    return reference_of(samples)


def assert_recurrent(ours, theirs, reference):
    """Ours are float64's but for rounding, and so are those of transformers.

    Transformers makes the decay between two tokens of a difference of sums, which loses the digits that the
    sums have in common: more than one rounding of each result.
    """
    assert_rounded(ours, reference)
    assert_rounded(theirs, reference._replace(bound=4 * reference.bound))


def valid_rows(rows, tree):
    return np.asarray(rows)[np.asarray(tree.valid)]
