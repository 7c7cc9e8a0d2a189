"""Training on one device."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def first_device_alone():
    """Training takes all devices; here it sees one. Processes of their own say how many they have."""
    devices = jax.devices()[:1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "device_count", lambda: 1)
        patch.setattr(jax, "devices", lambda *_: devices)
        yield
