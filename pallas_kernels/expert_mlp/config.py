"""Tile sizes and launch settings of the Triton kernels: a rule of the sizes, apart from what they compute."""

from dataclasses import dataclass

from pallas_kernels.checks import check_config

# Programs that keep the largest GPUs busy: two for each of their processors, about.
_PROGRAMS = 256
_ROWS = (16, 32, 64, 128)  # a tensor core's product has 16 rows at least
_FEW_TOKENS = 128  # up to so many, blocks of narrow weights have 1.5 times an expert's mean rows
_COLUMNS = (128, 64)  # of plain weights: narrower ones are slower even for one token
# (features, model columns, depth, warps) by weight format. First: 16-row blocks when the features
# of the second would give fewer than `_PROGRAMS` programs. Second: other 16-row blocks. Third: larger blocks.
# On an H200 they were within 3 % of the fastest with 1, 16, 64 and 128 tokens: MXFP4 in GPT-OSS-20B's shapes
# (128 tokens in 32-row blocks), and FP8 in Qwen3-30B-A3B's (all in 16-row blocks). Of other calls 256 tokens
# of MXFP4 were measured, in 64-row blocks. A word has four columns of FP8, and each warp has at least eight
# words: with four words a warp, 128 tokens took 63 % longer.
_NARROW = {
    "fp8": ((32, 32, 128, 1), (128, 128, 64, 4), (128, 128, 64, 4)),
    "fp8_rows": ((32, 64, 128, 2), (32, 64, 128, 2), (64, 128, 128, 4)),
    "mxfp4": ((32, 32, 256, 4), (64, 128, 128, 4), (64, 128, 128, 4)),
}
# Of shared memory, for the tiles on their way: every GPU since Ampere has a little more.
_TILE_BYTES = 80 << 10
# With more, narrow weights took up to 10 % longer.
_MOST_STAGES = {"plain": 6, "fp8": 4, "fp8_rows": 4, "mxfp4": 3}
# Rows of a block from which it has eight warps. With eight, 64 rows of MXFP4 took 41 % longer.
_EIGHT_WARPS = {"plain": 64, "fp8": 64, "fp8_rows": 64, "mxfp4": 128}


@dataclass(frozen=True, slots=True)
class Config:
    """How the kernels cut their work up. No setting changes a result by more than rounding.

    Attributes:
        block_rows: Rows of one expert that a program computes at once.
        block_features: Hidden features of a program of the first product, which reads as many columns of both
            halves.
        block_model: Columns of a program of the second product.
        block_depth: Terms of both products' sums that are loaded in one step.
        num_warps: Warps of a program.
        num_stages: Steps of tiles on their way at once.
    """

    block_rows: int
    block_features: int
    block_model: int
    block_depth: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        tiles = dict.fromkeys(("block_rows", "block_features", "block_model", "block_depth"), 16)
        check_config(self, powers={**tiles, "num_warps": 1}, counts=("num_stages",))


def config_for(
    *, stored: str, tokens: int, top_k: int, experts: int, size: int, features: int, itemsize: int
) -> Config:
    """The configuration of a call.

    An expert's rows should fit into one block, because every block reads the expert's weights again. A block
    has room for 1.5 times an expert's mean rows. Reading plain weights twice costs most, so with them, and
    with more than 128 tokens, it has room for 3 times, up to 32 rows, because routers have favourites. If
    few experts are chosen, columns are narrow, so that there are enough programs.
    """
    mean = tokens * top_k / experts
    groups = min(tokens * top_k, experts)
    tight = tokens <= _FEW_TOKENS and stored != "plain"
    wanted = 1.5 * mean if tight else max(1.5 * mean, min(3 * mean, 32))
    # Float32 has no tensor cores here: a large block would spill.
    rows = next((rows for rows in _ROWS if rows >= wanted), _ROWS[-1]) if itemsize == 2 else _ROWS[0]

    def enough(total: int, width: int) -> bool:
        return groups * -(-total // width) >= _PROGRAMS

    if itemsize == 2 and stored != "plain":
        few, most, larger = _NARROW[stored]
        blocks = larger if rows > _ROWS[0] else most if enough(features, most[0]) else few
        block_features, block_model, depth, warps = blocks
    else:
        block_features = 64
        block_model = next((width for width in _COLUMNS if enough(size, width)), _COLUMNS[-1])
        depth, warps = 128 if stored in ("fp8_rows", "mxfp4") else 128 // itemsize, 4
    weight = {"plain": itemsize, "fp8": 1, "fp8_rows": 1, "mxfp4": 0.5}[stored]
    row = 1 if stored == "fp8_rows" else itemsize
    stage = depth * (rows * row + max(2 * block_features, block_model) * weight)
    return Config(
        block_rows=rows,
        block_features=block_features,
        block_model=block_model,
        block_depth=depth,
        num_warps=8 if rows >= _EIGHT_WARPS[stored] else warps,
        num_stages=max(2, min(_MOST_STAGES[stored], int(_TILE_BYTES // stage))),
    )
