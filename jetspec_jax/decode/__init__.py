"""The device side of decoding: the round, its loop, prefill, and their arrays."""
