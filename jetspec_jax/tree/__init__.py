"""Token trees: candidates, building, acceptance and masks, independent of any model.

This package imports only JAX and `pallas_kernels`.

Shapes in this package: B sequences, N nodes, D draft depth, W width (most children of a node),
K candidates (best tokens of a draft row), V vocabulary. All functions are pure and work on whole
batches; the result for a sequence does not depend on the others.
"""

from jetspec_jax.tree.acceptance import Acceptance, accept
from jetspec_jax.tree.algorithms import (
    Algorithm,
    Plan,
    algorithm_names,
    algorithm_of,
    check_algorithm,
    get_algorithm,
    name_of,
    register_algorithm,
)
from jetspec_jax.tree.auto import Auto
from jetspec_jax.tree.building import build_tree, grow_tree
from jetspec_jax.tree.candidates import Candidates, top_candidates
from jetspec_jax.tree.contract import check_plan, check_tree
from jetspec_jax.tree.masks import ancestor_bits, ancestor_mask, path_sums
from jetspec_jax.tree.pairs import pair_log_probs
from jetspec_jax.tree.paths import path_tokens
from jetspec_jax.tree.planning import Breadth, breadth_of, check_breadth, check_traceable, plan_of
from jetspec_jax.tree.profiles import Profile
from jetspec_jax.tree.published import DEFAULT_ALGORITHM, AccumLogp
from jetspec_jax.tree.reach import Reach, reach_of, tree_buckets
from jetspec_jax.tree.routing import Hints, Routing
from jetspec_jax.tree.token_tree import BUCKETS, NO_PARENT, ROOT_INDEX, TokenTree, bucket_for, root_tree
from jetspec_jax.tree.trial import check_algorithm_contract

__all__ = [
    "BUCKETS",
    "DEFAULT_ALGORITHM",
    "NO_PARENT",
    "ROOT_INDEX",
    "Acceptance",
    "AccumLogp",
    "Algorithm",
    "Auto",
    "Breadth",
    "Candidates",
    "Hints",
    "Plan",
    "Profile",
    "Reach",
    "Routing",
    "TokenTree",
    "accept",
    "algorithm_names",
    "algorithm_of",
    "ancestor_bits",
    "ancestor_mask",
    "breadth_of",
    "bucket_for",
    "build_tree",
    "check_algorithm",
    "check_algorithm_contract",
    "check_breadth",
    "check_plan",
    "check_traceable",
    "check_tree",
    "get_algorithm",
    "grow_tree",
    "name_of",
    "pair_log_probs",
    "path_sums",
    "path_tokens",
    "plan_of",
    "reach_of",
    "register_algorithm",
    "root_tree",
    "top_candidates",
    "tree_buckets",
]
