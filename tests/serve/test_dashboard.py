"""The dashboard asks for figures that there are."""

import json
import re
from pathlib import Path

DASHBOARD = Path(__file__).parents[2] / "deploy/grafana.json"


def test_every_figure_of_the_dashboard_exists(http):
    http.post("/v1/completions", json={"prompt": "def f(x):", "max_tokens": 40, "temperature": 0})
    served = http.get("/metrics").text
    known = set(re.findall(r"^# TYPE (\S+) ", served, re.MULTILINE))
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    asked = {
        name
        for panel in panels
        for target in panel["targets"]
        for name in re.findall(r"jetspec:\w+", target["expr"])
    }
    assert len(asked) > 15
    assert {name.removesuffix("_bucket") for name in asked} <= known
