"""The device's side of decoding: the round, its loop, prefill, and the arrays that they work on."""
