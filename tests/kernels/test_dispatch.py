"""The choice of an implementation, and what may stand in the way of a GPU kernel."""

from types import SimpleNamespace

import jax
import pytest

from pallas_kernels import dispatch
from pallas_kernels.dispatch import Implementation, Operation, gpu_problem


def even_only(number, *, scale):
    return None if number * scale % 2 == 0 else f"{number * scale} is odd"


FAST, SLOW = Implementation(lambda: "fast", even_only), Implementation(lambda: "slow")
OP = Operation("op", {"fast": FAST, "slow": SLOW})


def test_none_is_the_first_that_can():
    assert OP.choose(None, 2, scale=1)() == "fast"
    assert OP.choose(None, 1, scale=1)() == "slow"


def test_a_name_is_that_one_or_an_error():
    assert OP.choose("slow", 2, scale=1)() == "slow"
    assert OP.choose("fast", 1, scale=2)() == "fast"
    with pytest.raises(NotImplementedError, match="op: fast cannot run: 3 is odd"):
        OP.choose("fast", 1, scale=3)
    with pytest.raises(ValueError, match="op has no implementation 'best'; available: fast, slow"):
        OP.choose("best", 2, scale=1)


def test_all_reasons_when_none_can():
    op = Operation("op", {"a": FAST, "b": FAST})
    with pytest.raises(NotImplementedError, match="op: a cannot run: 1 is odd; b cannot run: 1 is odd"):
        op.choose(None, 1, scale=1)


@pytest.mark.parametrize(
    ("version", "named"), [("8.0", True), ("8.9", False), ("9.0", False), ("gfx942", False)]
)
def test_a_gpu_without_fp8_is_named(version, named):
    problem = dispatch.fp8_problem(SimpleNamespace(compute_capability=version, device_kind="NVIDIA A100"))
    assert (problem == "NVIDIA A100 has no FP8 (compute capability 8.0, below 8.9)") == named
    assert named or problem is None


@pytest.mark.parametrize("device", ["cpu", jax.devices("cpu")[0]], ids=["name", "device"])
def test_no_gpu(device):
    with jax.default_device(device):
        assert gpu_problem() == "no GPU: the default device is a cpu"


@pytest.mark.parametrize(
    ("device", "problem"),
    [
        ({"platform": "gpu", "compute_capability": "9.0"}, None),
        ({"platform": "gpu", "compute_capability": "8.0"}, None),
        ({"platform": "cuda", "compute_capability": "12.1"}, None),
        ({"platform": "gpu", "compute_capability": "7.5"}, "compute capability 7.5 is older than 8.0"),
        ({"platform": "gpu", "compute_capability": "gfx942"}, "no NVIDIA GPU: the default device is a X"),
        ({"platform": "rocm"}, "no NVIDIA GPU: the default device is a X"),
        ({"platform": "tpu"}, "no GPU: the default device is a tpu"),
    ],
)
def test_default_devices(monkeypatch, device, problem):
    local = [SimpleNamespace(device_kind="X", **device)]
    monkeypatch.setattr(dispatch.jax, "local_devices", lambda backend=None: local)
    assert gpu_problem() == problem


def test_a_program_that_xla_splits():
    mesh = jax.sharding.AbstractMesh((2, 4), ("data", "fsdp"))
    with jax.sharding.use_abstract_mesh(mesh):
        assert gpu_problem() == "XLA splits the program over 8 devices, and cannot split a kernel"
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1, 1), ("data", "fsdp"))):
        assert gpu_problem() == "no GPU: the default device is a cpu"
