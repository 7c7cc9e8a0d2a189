"""The shapes people run, one registry for tests, benchmarks and tuning."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """One attention layer of a model family, and the calls that serving it makes.

    `rows` are block sizes: plain decoding, the tree buckets and prompt chunks. `prefixes` are
    committed lengths, all whole pages.
    """

    name: str
    heads: int
    kv_heads: int
    head_size: int
    window: int | None = None
    sinks: bool = False
    page: int = 64
    rows: tuple[int, ...] = (1, 16, 32, 64, 128, 256, 512, 1024)
    prefixes: tuple[int, ...] = (1024, 8192, 32768)


SHAPES = (
    AttentionShape("qwen3-8b", heads=32, kv_heads=8, head_size=128),
    AttentionShape("qwen3-0.6b", heads=16, kv_heads=8, head_size=128),
    AttentionShape("gemma4-26b-sliding", heads=16, kv_heads=8, head_size=256, window=1024),
    AttentionShape("gemma4-26b-full", heads=16, kv_heads=2, head_size=512),
    AttentionShape("gpt-oss-20b-sliding", heads=64, kv_heads=8, head_size=64, window=128, sinks=True),
    AttentionShape("gpt-oss-20b-full", heads=64, kv_heads=8, head_size=64, sinks=True),
    AttentionShape("step-3.7-sliding", heads=96, kv_heads=8, head_size=128, window=512),
)
