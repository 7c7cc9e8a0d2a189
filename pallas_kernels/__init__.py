"""Kernels for JAX: one folder per operation, each with an XLA reference that states its meaning.

In every folder `api` is what a caller uses, and says what the letters in shapes mean; `reference` is the
specification, the test oracle and the fallback, a file named after a backend is a faster way to the same
numbers, and `shapes`, where they are many, lists the sizes people run, for tests, benchmarks and tuning
alike. `dispatch` chooses among the implementations of an operation, `checks` finds what is wrong with a call.
"""
