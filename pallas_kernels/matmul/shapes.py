"""The products people run, one registry for tests, benchmarks and tuning."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MatmulShape:
    """A product of a model's layer; `rows` are those of a call: plain decoding and the tree buckets."""

    name: str
    depth: int  # K
    columns: int  # N
    stored: tuple[str, ...] = ("plain", "fp8", "fp8_rows")
    rows: tuple[int, ...] = (1, 16, 64, 128, 256)


SHAPES = (
    MatmulShape("qwen3-8b-qkv", 4096, 6144),
    MatmulShape("qwen3-8b-o", 4096, 4096),
    MatmulShape("qwen3-8b-gate-up", 4096, 24576),
    MatmulShape("qwen3-8b-down", 12288, 4096),
    # One expert.
    MatmulShape("gpt-oss-20b-gate-up", 2880, 5760, ("plain", "mxfp4")),
    MatmulShape("gpt-oss-20b-down", 2880, 2880, ("plain", "mxfp4")),
)
