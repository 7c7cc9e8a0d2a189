"""Benchmarks: a program on top of `jetspec_jax`, run from a checkout as ``python -m bench``.

A command's module has ``add_arguments`` and ``run``. Rooms import from `common` and not from each other, but
for ``kernel``, whose command runs ``experts`` too, and ``plots``, which draws the reports of all. Pictures
are imported where they are drawn, so that matplotlib is loaded only then.
"""
