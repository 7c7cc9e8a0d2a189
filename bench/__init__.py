"""Benchmarks: a program on top of `jetspec_jax`, run from a checkout as ``python -m bench``.

A command's module has ``add_arguments`` and ``run``, which checks the options, measures, and ends with
`publish` of `bench.common.report`. That draws the report with ``arguments.draw``, which ``__main__`` sets to
`bench.plots.draw_kept`. Code that several commands share is in `bench.common`. Rooms import from it and not
from each other, except for ``kernel``, which also runs ``experts`` and ``matmul``, and ``plots``, which draws
the reports of all. Modules of pictures are imported when a picture is drawn, because they load matplotlib.
"""
