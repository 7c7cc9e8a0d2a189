"""Fixtures of all kernels' tests."""

import pytest

from pallas_kernels.dispatch import Implementation
from tests.kernels import ptx

ptx.interpret()


@pytest.fixture
def stand_in(monkeypatch):
    """Puts an interpreted kernel into the place of an operation's `pallas_triton`."""

    def replace(api, kernel):
        monkeypatch.setitem(api.OPERATION.table, "pallas_triton", Implementation(kernel))

    return replace
