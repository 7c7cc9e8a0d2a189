"""GPUs that do not reach each other: who is asked, and what is said."""

import logging
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jetspec_jax import load_target
from jetspec_jax.demo import DEMO_TARGET
from jetspec_jax.device import peers
from tests.meshes import mesh_of


class Device(SimpleNamespace):
    __hash__ = object.__hash__


def device(number, hardware, platform="gpu", process=0):
    return Device(id=number, local_hardware_id=hardware, platform=platform, process_index=process)


def mesh(*devices):
    return SimpleNamespace(devices=np.asarray(devices, object).reshape(1, -1))


@pytest.fixture
def said(caplog):
    """The logged warnings about devices, which a process logs once."""
    peers._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "jetspec_jax"):
        yield lambda: [line for line in caplog.messages if "reach each other" in line]
    peers._warn_once.cache_clear()


def bridged(first, second):
    return first // 2 == second // 2


@pytest.mark.usefixtures("no_type_checks")
def test_only_those_of_one_group_matter(said):
    four = [device(number, number) for number in range(4)]
    peers.say_apart((mesh(*four[:2]), mesh(*four[2:]), None), bridged)
    assert said() == []
    for _ in range(2):
        peers.say_apart((mesh(four[0], four[2]), mesh(four[1], four[3])), bridged)
    [line] = said()
    assert line.startswith("devices 0, 2, 1, 3 do not reach each other directly: ")


def test_one_way_is_not_enough_and_one_alone_may_be_apart():
    three = [device(number, number) for number in range(3)]
    assert peers.apart(three, lambda first, second: (first, second) != (2, 0)) == [three[0], three[2]]


def test_the_driver_is_asked_by_its_own_numbers_for_gpus_of_this_process():
    asked = []

    def reaches(*pair):
        asked.append(pair)
        return False

    first, second = device(4, 0), device(5, 1)
    others = [device(0, 0, process=1), device(6, 2, platform="cpu")]
    assert peers.apart([first, second, *others], reaches) == [first, second]
    assert asked == [(0, 1), (1, 0)]


@pytest.mark.usefixtures("no_type_checks")
def test_nobody_can_say(said):
    peers.say_apart((mesh(device(0, 0), device(1, 1)),), lambda *_: None)
    assert said() == []


def test_devices_of_a_cpu(said, monkeypatch):
    """Nobody is asked; and a target that is read asks of the devices where it will lie."""
    asked = []
    monkeypatch.setattr(peers, "apart", lambda devices, _: asked.append(devices) or [])
    where = mesh_of(1, 2)
    load_target(DEMO_TARGET, mesh=where)
    assert asked == [list(where.devices.flat)]
    monkeypatch.undo()
    if where.devices.flat[0].platform == "cpu":
        peers.say_apart((where,), lambda *_: False)
        assert said() == []


def gpus(count, **changes):
    devices = [device(number, number) for number in range(count)]
    for each in devices:
        each.device_kind = "NVIDIA H200"
    for name, values in changes.items():
        for each, value in zip(devices, values, strict=True):
            setattr(each, name, value)
    return devices


@pytest.mark.parametrize(
    ("changes", "capability", "reaches", "why"),
    [
        ({}, (9, 0), True, None),
        ({}, (10, 0), True, None),
        ({}, (8, 0), True, "they are older than Hopper"),
        ({}, (9, 0), False, "not all of them reach each other's memory"),
        ({}, (9, 0), None, "not all of them reach each other's memory"),
        ({"id": (2, 3)}, (9, 0), True, "they are not the first devices of this process"),
        ({"platform": ("cpu", "cpu")}, None, True, "not all of them are GPUs"),
        (
            {"device_kind": ("NVIDIA H200", "NVIDIA H100 80GB HBM3")},
            (9, 0),
            True,
            "they are of several kinds: NVIDIA H100 80GB HBM3, NVIDIA H200",
        ),
    ],
)
def test_which_devices_add_up_through_their_memory(changes, capability, reaches, why, monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    monkeypatch.setattr(peers, "compute_capability", lambda: capability)
    assert peers.why_no_exchange(gpus(2, **changes), lambda *_: reaches) == why


def test_old_versions_and_several_processes_leave_sums_to_xla(monkeypatch):
    monkeypatch.setattr(peers, "compute_capability", lambda: (9, 0))
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 1))
    assert peers.why_no_exchange(gpus(2), lambda *_: True).startswith("that needs JAX 0.11.2, and this is ")
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert peers.why_no_exchange(gpus(2), lambda *_: True) == "they belong to several processes"


class Driver:
    """NVIDIA's, for three GPUs of which the first two reach each other."""

    def __init__(self, fails=()):
        self.fails = fails

    def cuInit(self, flags):
        return "init" in self.fails

    def cuDeviceGet(self, handle, number):
        handle._obj.value = 10 + number
        return 101 if number > 2 else 0

    def cuDeviceCanAccessPeer(self, can, first, second):
        can._obj.value = {first.value, second.value} == {10, 11}
        return 1 if "peer" in self.fails else 0


def test_what_the_driver_says():
    reaches = peers.reaches_by(Driver())
    assert [reaches(0, 1), reaches(1, 0), reaches(0, 2), reaches(0, 3)] == [True, True, False, None]
    for failure in ("init", "peer"):
        assert peers.reaches_by(Driver([failure]))(0, 1) is None


def test_no_driver(monkeypatch):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(peers.ctypes, "CDLL", missing)
    assert peers.driver_reaches.__wrapped__()(0, 1) is None
