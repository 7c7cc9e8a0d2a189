"""Sampling: a request's parameters, and the target's choice of tokens."""
