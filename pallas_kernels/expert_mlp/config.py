"""Tile sizes and launch settings of the Triton kernels: a rule of the sizes, apart from what they compute."""

from dataclasses import dataclass

from pallas_kernels.checks import check_config

# Programs that keep the largest GPUs busy: two for each of their processors, about.
_PROGRAMS = 256
_ROWS = (16, 32, 64, 128)  # a tensor core's product has 16 rows at least
_CROWD_ROWS = 64  # of a block, where many tokens have chosen one expert
_CROWD_TOKENS = 128  # of a call, above which there are no such blocks
_COLUMNS = (128, 64)  # narrower ones are slower even for one token, though there are more programs
# Of shared memory, for the tiles on their way: every GPU since Ampere has a little more.
_TILE_BYTES = 80 << 10
_MOST_STAGES = 6


@dataclass(frozen=True, slots=True)
class Config:
    """How the kernels cut their work up. No setting changes a result by more than rounding.

    Attributes:
        block_rows: Rows of one expert that a program computes at once.
        crowd_rows: Rows that it computes at a time where an expert has more than those.
        block_features: Hidden features of a program of the first product, which reads as many columns of both
            halves.
        block_model: Columns of a program of the second product.
        block_depth: Terms of both products' sums that are loaded in one step.
        num_warps: Warps of a program.
        num_stages: Steps of tiles on their way at once.
    """

    block_rows: int
    crowd_rows: int
    block_features: int
    block_model: int
    block_depth: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        tiles = dict.fromkeys(("block_rows", "crowd_rows", "block_features", "block_model"), 16)
        # Half of it where a crowd's blocks are another size.
        depth = 16 if self.crowd_rows == self.block_rows else 32
        powers = {**tiles, "block_depth": depth, "num_warps": 1}
        check_config(self, powers=powers, counts=("num_stages",))


def config_for(
    *, stored: str, tokens: int, top_k: int, experts: int, size: int, features: int, itemsize: int
) -> Config:
    """The configuration of a call.

    An expert's rows should fit into one block, for every block reads the expert's weights again: a block has
    half as many again as an expert gets on average. But routers have favourites. Of up to 128 tokens those
    get larger blocks. With more tokens the room that larger blocks need would slow all others down; there
    blocks have at least 32 rows. Few experts are cut into narrow columns: so there are enough programs.

    Of FP8 a warp has at least eight words of columns.
    """
    mean = tokens * top_k / experts
    groups = min(tokens * top_k, experts)
    wanted = 1.5 * mean if tokens <= _CROWD_TOKENS else max(1.5 * mean, min(3 * mean, 32))
    # Float32 has no tensor cores here: a large block would spill.
    rows = next((rows for rows in _ROWS if rows >= wanted), _ROWS[-1]) if itemsize == 2 else _ROWS[0]
    crowded = tokens <= _CROWD_TOKENS and itemsize == 2

    def columns(total: int, widest: int) -> int:
        fit = [width for width in _COLUMNS if width <= widest and groups * -(-total // width) >= _PROGRAMS]
        return fit[0] if fit else _COLUMNS[-1]

    fp8 = stored == "fp8" and itemsize == 2
    block_features, block_model = columns(features, 128 if fp8 else 64), columns(size, 128)
    depth = 128 if stored in ("fp8_rows", "mxfp4") else 128 // itemsize
    weight = {"plain": itemsize, "fp8": 1, "fp8_rows": 1, "mxfp4": 0.5}[stored]
    stage = depth * (rows * itemsize + max(2 * block_features, block_model) * weight)
    warps = min(4, min(block_features, block_model) // 32) if fp8 else 4
    # With six, programs of so few rows took 3 to 5 % longer on an H100.
    most_stages = 4 if stored == "mxfp4" and rows == _ROWS[0] else _MOST_STAGES
    return Config(
        block_rows=rows,
        crowd_rows=max(rows, _CROWD_ROWS) if crowded else rows,
        block_features=block_features,
        block_model=block_model,
        block_depth=depth,
        num_warps=8 if rows >= 64 else warps,
        num_stages=max(2, min(most_stages, int(_TILE_BYTES // stage))),
    )
