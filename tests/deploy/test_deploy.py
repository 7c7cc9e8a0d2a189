"""What stands in ``deploy/``, as far as it can be looked at without Docker, Ray, Prometheus and Grafana."""

import json
import re
import runpy
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import yaml

from jetspec_jax.cli import command
from tests.serve.conftest import small_target
from tests.serve.scripted import Scripted

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
SERVER = sorted((ROOT / "jetspec_jax/serve").glob("*.py"))
DASHBOARD = json.loads((DEPLOY / "grafana.json").read_text("utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def metrics():
    """Names of the metrics that the dashboard asks for, without what Prometheus adds to them."""
    variables = [str(own.get("query")) for own in DASHBOARD["templating"]["list"]]
    asked = " ".join([*variables, *(target["expr"] for panel in PANELS for target in panel["targets"])])
    return {re.sub("_(total|bucket)$", "", name) for name in re.findall(r"jetspec:(\w+)", asked)}


@pytest.mark.parametrize("name", sorted(metrics()))
def test_the_dashboard_asks_for_metrics_that_the_server_has(name):
    assert any(f'"{name}"' in path.read_text("utf-8") for path in SERVER)


def test_panels_of_the_dashboard_stand_apart_and_fill_their_rows():
    assert len(PANELS) > 12
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    taken = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        columns = range(place["x"], place["x"] + place["w"])
        cells = {(x, y) for x in columns for y in range(place["y"], place["y"] + place["h"])}
        assert not taken & cells
        assert max(columns) < 24
        taken |= cells
    assert {sum(x == column for x, _ in taken) for column in range(24)} == {len(taken) // 24}


def test_the_program_for_ray_is_short():
    text = (DEPLOY / "ray_serve.py").read_text("utf-8")
    compile(text, "ray_serve.py", "exec")
    assert text.count("\n") <= 60


@pytest.mark.parametrize(("what", "count"), [("none", 0), ("usual", 1), ("all", 2)])
def test_a_replica_of_ray_compiles_what_its_settings_say(monkeypatch, what, count):
    ray: Any = types.ModuleType("ray")
    made = []
    ray.serve = types.SimpleNamespace(
        Application=object,
        ingress=lambda build: lambda: build,
        deployment=lambda **_: lambda build: types.SimpleNamespace(bind=lambda: build),
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr("jetspec_jax.AsyncLLM", lambda **_: made.append(Scripted(small_target())) or made[0])
    program = runpy.run_path(str(DEPLOY / "ray_serve.py"))
    build = program["app"](program["Replicas"](settings={"warm_up": what}))
    assert build().state.service.settings.warm_up == what
    assert len(made[0].warmed) == count


def test_what_compose_mounts_and_builds_is_there():
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))["services"]
    mounted = [volume.partition(":")[0] for own in services.values() for volume in own.get("volumes", ())]
    files = [path for path in mounted if path.startswith(".")]
    assert len(files) == 4
    assert all((DEPLOY / path).is_file() for path in files)
    build = services["jetspec"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).is_file()


def test_what_the_image_copies_is_there_and_not_ignored():
    text = (DEPLOY / "Dockerfile").read_text("utf-8")
    sources = [name for line in re.findall(r"^COPY (.+) \S+$", text, re.M) for name in line.split()]
    kept = re.findall(r"^!(.+)$", (DEPLOY / "Dockerfile.dockerignore").read_text("utf-8"), re.M)
    assert sorted(sources) == sorted(kept)
    assert all((ROOT / name).exists() for name in sources)


def test_the_server_of_image_and_compose_has_the_options_it_is_given():
    text = (DEPLOY / "Dockerfile").read_text("utf-8")
    [entry] = re.findall(r"^ENTRYPOINT (\[.*\])$", text, re.M)
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))["services"]
    arguments = command._parser().parse_args([*json.loads(entry)[1:], *services["jetspec"]["command"]])
    assert (arguments.host, arguments.port, arguments.target) == ("0.0.0.0", 8000, "demo")
