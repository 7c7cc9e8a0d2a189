"""Requests that come over time: waits, gaps, prompts, rounds of many slots, and the host's share."""
