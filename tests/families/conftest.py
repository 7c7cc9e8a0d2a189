"""Every test that asks for one of these runs for every golden."""

import pytest

from tests.families.goldens import NAMES, golden_target


@pytest.fixture(scope="module", params=NAMES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def target(family):
    return golden_target(family)
