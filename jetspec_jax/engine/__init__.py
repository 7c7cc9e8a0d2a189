"""The host's side of decoding: requests, slots, pages, scheduling, and outputs."""
