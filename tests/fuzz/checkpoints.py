"""Checkpoints that something was done to: loaded, described, converted, and decoded with where they load."""

import json
import shutil

import jax
import numpy as np
from safetensors.numpy import load_file

from convert.conversion import to_huggingface, to_orbax
from jetspec_jax import (
    CheckpointError,
    DeviceMemoryError,
    Head,
    SamplingParams,
    generate,
    generate_tree,
    load_draft_head,
    load_target,
    logits,
)
from jetspec_jax.checkpoint.reading import read_headers
from jetspec_jax.checkpoint.writing import save_checkpoint
from jetspec_jax.inspect.describe import describe
from jetspec_jax.inspect.exactness import first_divergence
from tests.decode.tiny import word_tokenizer
from tests.families.goldens import FOLDER, NAMES
from tests.fuzz.mutators import mutate, pick
from tests.fuzz.outcomes import Finding, ending
from tests.loading.published import HEAD, V4, V5, halves, head_shapes, random_tensors, target_shapes, write

SIZES = {"vocab_size": 64, "num_hidden_layers": 2, "max_window_layers": 2}
TARGET = {**V4, **SIZES}
NEWER = {**V5, **SIZES, "layer_types": ["full_attention"] * 2}
TIED = {**TARGET, "tie_word_embeddings": True}
DRAFT = {
    **HEAD,
    **SIZES,
    "num_hidden_layers": 1,
    "num_target_layers": 2,
    "dflash_config": {"causal_head": True, "mask_token_id": 63, "target_layer_ids": [0, 1]},
}
PROMPT, PARAMS = [1, 2, 3], SamplingParams(max_tokens=8, ignore_eos=True)
IDS = np.arange(8)[None]
# What a file's content may end in. What is not there is no content.
ALLOWED = (CheckpointError, DeviceMemoryError, FileNotFoundError)


class Checkpoints:
    """Cases over copies of a few small checkpoints."""

    def __init__(self, place, seed, families=NAMES):
        """Makes the checkpoints, and compiles what is decoded with."""
        self.place, self.seed, self.count = place, seed, 0
        self.sound = place / "sound"
        self.sound.mkdir()
        tensors = random_tensors(target_shapes(TARGET))
        write(self.sound / "target", TARGET, tensors)
        word_tokenizer(64).save_pretrained(self.sound / "target")
        (self.sound / "target" / "generation_config.json").write_text('{"eos_token_id": [3, 5]}')
        write(self.sound / "sharded", NEWER, *halves(tensors))
        tied = random_tensors(target_shapes(TIED))
        write(self.sound / "tied", TIED, tied | {"lm_head.weight": tied["model.embed_tokens.weight"]})
        write(self.sound / "head", DRAFT, random_tensors(head_shapes(DRAFT)))
        to_orbax(self.sound / "target", self.sound / "orbax")
        for name in families:
            shutil.copytree(FOLDER / name, self.sound / name, ignore=shutil.ignore_patterns("*.npy"))
        self.names = sorted(path.name for path in self.sound.iterdir())
        self.target = load_target(self.sound / "target", dtype="float32")
        self.head = load_draft_head(self.sound / "head", dtype="float32", target=self.target)
        # Most of the rest has this config too; others are compiled when one of them is decoded with.
        self._decode(self.target, self.head)

    def __call__(self, index):
        """Runs one case: what was done, and how it ended."""
        rng = np.random.default_rng([self.seed, 1, index])
        # Most surprises are in the plain ones: they have all kinds of files.
        name = pick(rng, [*self.names, "target", "target", "sharded", "head"])
        folder = self.place / f"{index}-{name}"
        shutil.copytree(self.sound / name, folder)
        done = [mutate(folder, rng) for _ in range(int(rng.choice([1, 1, 1, 2, 3])))]
        action = pick(rng, ("load", "load", "load", "describe", "convert"))
        what = f"{name}, {action}: {'; '.join(done)}"
        try:
            return what, self._run(folder, name, action)
        except Finding as finding:
            raise Finding(f"{what}: {finding}") from finding
        finally:
            shutil.rmtree(folder)

    def _run(self, folder, name, action):
        out = folder / "out"
        try:
            if name == "orbax":
                to_huggingface(folder, out)
                return self._loaded(out, "target")
            if action == "describe":
                json.dumps(describe(folder))
                return "described"
            if action == "convert":
                to_orbax(folder, out)
                to_huggingface(out, folder / "back")
                _check_same_tensors(folder, folder / "back")
                return "converted"
            return self._loaded(folder, name)
        except Finding:
            raise
        except BaseException as error:
            return ending(error, ALLOWED, folder)

    def _loaded(self, folder, name):
        """A checkpoint that loads holds what its files say, and decodes without loss."""
        if name == "head":
            head = load_draft_head(folder, dtype="float32")
            _check_saved(folder, head)
            if head.config != self.head.config:
                return "loaded, another head"
            self._decode(self.target, head)
            return "decoded"
        target = load_target(folder, dtype="float32")
        _check_saved(folder, target)
        sound = load_target(self.sound / name, dtype="float32")
        if target.config != sound.config:
            return "loaded, another config"
        if not all(map(np.array_equal, jax.tree.leaves(target.weights), jax.tree.leaves(sound.weights))):
            self._decode(target, self.head if target.config == self.target.config else None)
            return "decoded"
        return "loaded, unharmed"

    def _decode(self, target, head):
        rows = np.asarray(logits(target, IDS))
        if rows.shape != (1, 8, target.config.vocab_size):
            raise Finding(f"logits of shape {rows.shape}")
        if head is None:
            return
        # Weights of 1e38 are finite and their products are not: then there is nothing to compare.
        try:
            [tree] = generate_tree(target, head, [PROMPT], PARAMS, budget=16, width=3)
            [plain] = generate(target, [PROMPT], PARAMS)
        except ValueError as error:
            if "logits are not numbers" not in str(error):
                raise
            return
        if np.isfinite(rows).all():
            difference = first_divergence(target, PROMPT, PARAMS, tree.token_ids, plain.token_ids)
            if difference is not None and not difference.is_tie:
                raise Finding(f"tree and plain decoding differ: {difference}")


def _check_saved(folder, loaded):
    """What was loaded, written again, holds the tensors of the files that were read."""
    raw = json.loads((folder / "config.json").read_text())
    out = folder / "saved"
    save_checkpoint(out, raw, loaded.weights, dtype="float32", config=loaded.config)
    unused = read_headers(folder).plan(loaded.config).unused
    _check_same_tensors(folder, out, unused=[name for names in unused.values() for name in names])
    assert isinstance(loaded, Head) or loaded.tokenizer is None or loaded.tokenizer.encode("abc")


def _check_same_tensors(folder, out, unused=()):
    listing = folder / "model.safetensors.index.json"
    files = sorted(folder.glob("*.safetensors"))
    if listing.exists():
        files = [folder / name for name in set(json.loads(listing.read_text())["weight_map"].values())]
    stored = {}
    for file in files:
        stored |= load_file(file)
    [written] = out.glob("*.safetensors")
    for name, tensor in load_file(written).items():
        if not np.array_equal(tensor, np.asarray(stored[name], np.float32)):
            raise Finding(f"{name} is not what the file holds")
        if name in unused:
            raise Finding(f"{name} counts as unused")
