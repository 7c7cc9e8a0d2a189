"""Trackers beside TensorBoard, with small fakes of their packages: what they get, and what they never get."""

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest

from train.trackers import opening
from train.trackers.opening import Lenient, Tracking
from train.trackers.tracker import Row

RECIPE = {"fit.steps": 4, "head.taps": [0, 1]}
ROWS = [Row(1, {"train/loss": 2.0}), Row(1, {"evaluation/tau/16": 1.5}), Row(2, {"train/loss": 1.0})]


class FakeWandB(ModuleType):
    def __init__(self, step=0):
        super().__init__("wandb")
        self.step, self.begun, self.logged, self.codes = step, [], [], []

    def Settings(self, **settings):
        return settings

    def init(self, **given):
        self.begun.append(given)

        def log(values, step):
            self.logged.append((step, values))

        return SimpleNamespace(step=self.step, log=log, finish=lambda exit_code: self.codes.append(exit_code))


class FakeMLflow(ModuleType):
    """A store of experiments and runs, with the client's methods."""

    def __init__(self):
        super().__init__("mlflow")
        self.experiments, self.runs = {}, {}
        self.entities = ModuleType("mlflow.entities")
        self.entities.Param = lambda name, value: (name, value)
        self.entities.Metric = lambda tag, value, timestamp, step: (tag, value, step)

    def MlflowClient(self):
        return self

    def get_experiment_by_name(self, name):
        found = self.experiments.get(name)
        return None if found is None else SimpleNamespace(experiment_id=found)

    def create_experiment(self, name):
        self.experiments[name] = f"experiment {len(self.experiments)}"
        return self.experiments[name]

    def create_run(self, experiment_id):
        assert experiment_id in self.experiments.values()
        run = f"run {len(self.runs)}"
        self.runs[run] = SimpleNamespace(status="RUNNING", params=[], metrics=[], batches=[])
        return SimpleNamespace(info=SimpleNamespace(run_id=run))

    def update_run(self, run_id, status):
        self.runs[run_id].status = status

    def log_batch(self, run_id, metrics=(), params=()):
        self.runs[run_id].batches.append((len(metrics), len(params)))
        self.runs[run_id].metrics += metrics
        self.runs[run_id].params += params

    def set_terminated(self, run_id, status):
        self.runs[run_id].status = status


@pytest.fixture
def wandb(monkeypatch):
    fake = FakeWandB()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


@pytest.fixture
def mlflow(monkeypatch):
    fake = FakeMLflow()
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    monkeypatch.setitem(sys.modules, "mlflow.entities", fake.entities)
    return fake


def test_weights_and_biases_gets_the_recipe_and_the_figures(wandb, tmp_path):
    [tracker] = Tracking(("wandb",), "mine").open(tmp_path, RECIPE)
    tracker.log(ROWS)
    tracker.close(failed=False)
    [given] = wandb.begun
    settings = given.pop("settings")
    assert (settings["host"], settings["console"], settings["x_disable_meta"]) == ("-", "off", True)
    assert settings["disable_git"]
    assert settings["disable_code"]
    identity = json.loads((tmp_path / "trackers.json").read_text())["wandb"]
    expected = {"project": "mine", "dir": str(tmp_path), "config": RECIPE, "id": identity, "resume": "allow"}
    assert given == expected
    assert wandb.logged == [(step, values) for step, values in ROWS]
    assert wandb.codes == [0]


def test_a_resumed_run_of_weights_and_biases_sends_no_step_again(wandb, tmp_path):
    Tracking(("wandb",)).open(tmp_path, RECIPE)
    wandb.step = 2
    [tracker] = Tracking(("wandb",)).open(tmp_path, RECIPE)
    tracker.log(ROWS)
    tracker.close(failed=True)
    assert wandb.begun[0]["id"] == wandb.begun[1]["id"]
    assert wandb.logged == [(2, {"train/loss": 1.0})]
    assert wandb.codes == [1]


def test_mlflow_gets_the_recipe_and_the_figures(mlflow, tmp_path):
    [tracker] = Tracking(("mlflow",), "mine").open(tmp_path, RECIPE)
    tracker.log(ROWS)
    tracker.close(failed=True)
    [run] = mlflow.runs.values()
    assert list(mlflow.experiments) == ["mine"]
    assert run.params == [("fit.steps", "4"), ("head.taps", "[0, 1]")]
    assert run.metrics == [(tag, x, row.step) for row in ROWS for tag, x in row.values.items()]
    assert run.status == "FAILED"

    [again] = Tracking(("mlflow",), "mine").open(tmp_path, RECIPE)
    assert run.status == "RUNNING"
    again.log([Row(3, {f"train/{i}": 0.0 for i in range(2001)})])
    again.close(failed=False)
    assert len(mlflow.runs) == 1
    assert run.batches[-3:] == [(1000, 0), (1000, 0), (1, 0)]
    assert (len(run.params), run.status) == (2, "FINISHED")


@pytest.mark.parametrize("name", opening.TRACKERS)
def test_a_missing_package_is_an_error_that_names_the_extra(name, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, name, None)
    message = rf'the tracker {name} needs {name}: pip install "jetspec-jax\[{name}\]"'
    with pytest.raises(ValueError, match=message):
        Tracking((name,)).check()
    with pytest.raises(ValueError, match=message):
        Tracking((name,)).open(tmp_path, RECIPE)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("comet",), "a tracker is one of wandb, mlflow, not 'comet'"),
        (("wandb",) * 2, "the tracker wandb is named twice"),
    ],
)
def test_names_are_checked(wandb, names, message):
    with pytest.raises(ValueError, match=message):
        Tracking(names).check()


def test_a_run_that_is_refused_ends_those_before_it(wandb, mlflow, tmp_path, monkeypatch):
    def refuse(name):
        raise LookupError("no such store")

    monkeypatch.setattr(mlflow, "create_experiment", refuse)
    with pytest.raises(RuntimeError, match="mlflow cannot begin a run: LookupError: no such store"):
        Tracking(("wandb", "mlflow")).open(tmp_path, RECIPE)
    assert wandb.codes == [1]
    # The next start continues the run that was begun.
    assert json.loads((tmp_path / "trackers.json").read_text()) == {"wandb": wandb.begun[0]["id"]}
    (tmp_path / "trackers.json").write_text('{"mlflow": "run 7"}')
    with pytest.raises(RuntimeError, match=r"mlflow cannot continue run run 7 of .*trackers\.json"):
        Tracking(("mlflow",)).open(tmp_path, RECIPE)


@pytest.mark.parametrize("damage", ["{", "[]", '{"wandb": 1}'])
def test_damaged_run_ids_are_named(wandb, tmp_path, damage):
    (tmp_path / "trackers.json").write_text(damage)
    with pytest.raises(ValueError, match=r"trackers\.json is damaged: .*; remove it to begin new runs"):
        Tracking(("wandb",)).open(tmp_path, RECIPE)


def test_a_tracker_that_fails_later_is_a_warning(caplog):
    class Broken:
        def log(self, rows):
            raise ConnectionError("refused")

        close = log

    tracker = Lenient("mlflow", Broken())
    tracker.log(ROWS)
    tracker.close(False)
    assert [record.getMessage() for record in caplog.records] == [
        "mlflow did not take steps 1 to 2, which are in log.jsonl: refused",
        "mlflow did not end its run: refused",
    ]


def test_without_names_nothing_is_opened(tmp_path):
    assert Tracking().open(tmp_path, RECIPE) == []
    assert list(tmp_path.iterdir()) == []
