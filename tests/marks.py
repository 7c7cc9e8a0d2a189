"""Marks that many tests share."""

import pytest


def wide(*values):
    """One case of a parametrised test that only `make test-all` runs."""
    return pytest.param(*values, marks=pytest.mark.wide)
