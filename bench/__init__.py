"""Benchmarks: a program on top of `jetspec_jax`, run from a checkout as ``python -m bench``.

A command's module has ``add_arguments`` and ``run``: it checks the options, begins a report, measures, and
ends with ``publish`` of `bench.common.report`. Folders import from `common`, and not from each other;
``kernel``, whose command also runs ``experts``, and ``plots``, which draws all reports, are exceptions.
Modules of pictures are imported when a picture is drawn, because they load matplotlib.
"""
