"""The loop on a small regression: it learns, goes on exactly where it stopped, and loses nothing."""

import contextlib
import dataclasses
import gc
import shutil
from types import SimpleNamespace

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.events import until
from tests.marks import wide
from tests.train.full_disk import files_of_at_most
from tests.train.head.tiny import losses, records
from train.loop import checkpoints
from train.loop.checkpoints import Checkpoints, TrainingCheckpointError
from train.loop.fit import Fit, make_optimizer, schedule
from train.loop.log import NonFiniteLoss
from train.loop.mesh import MeshSettings, make_mesh
from train.loop.stages import Deadline, OutOfTime
from train.loop.trainer import Evaluated, mean_of, train
from train.loss.objectives import Mean

FIT = Fit(steps=24, batch=4, learning_rate=1e-1, warmup=4, save_every=5, evaluate_every=6, log_every=4)
GOAL = jnp.arange(6.0).reshape(3, 2)


class StopAfter(Deadline):
    def __init__(self, looks):
        super().__init__()
        self.looks = looks

    def passed(self):
        self.looks -= 1
        return self.looks < 0


class Numbered(grain.DatasetIterator):
    """Batches of random rows that differ by their position."""

    def __init__(self, batch=4):
        super().__init__()
        self.batch, self.position = batch, 0

    def __next__(self):
        rng = np.random.default_rng(self.position)
        self.position += 1
        return {"x": rng.normal(size=(self.batch, 3)).astype(np.float32)}

    def get_state(self):
        return {"position": self.position}

    def set_state(self, state):
        self.position = state["position"]


def loss(weights, frozen, batch, key):
    """A noisy regression: what a step sees depends on its key, where there is no batch."""
    x = batch["x"] if batch else jax.random.normal(key, (4, 3))
    error = x @ weights["a"] - x @ frozen
    # Rows of one part weigh as much as those of another.
    return {
        "loss": Mean(jnp.sum(error**2), jnp.float32(error.size)),
        "first": Mean(jnp.sum(error, axis=0), jnp.full((2,), error.shape[0], jnp.float32)),
    }


def score(weights):
    return Evaluated({"validation_loss": jnp.mean(weights["a"] ** 2)}, -float(jnp.mean(weights["a"] ** 2)))


def run(folder, deadline=None, loss=loss, fit=FIT, batches=None, width=2, **changes):
    settings = {
        "frozen": GOAL,
        "batches": batches or Numbered(),
        "evaluate": score,
        "seed": 0,
        "deadline": deadline or Deadline(),
        "label": "test",
        "tokens_per_step": 7,
    }
    weights = {"a": jnp.ones((3, width)), "layers": {0: jnp.ones(2)}}
    return train(folder, fit, loss, weights, **{**settings, **changes})


@pytest.fixture(scope="module")
def watched():
    """The last record of the log whenever the whole run was watched."""
    return []


@pytest.fixture(scope="module")
def whole(tmp_path_factory, watched):
    folder = tmp_path_factory.mktemp("whole")
    return folder, run(folder, watch=lambda: watched.append(records(folder)[-1]))


def same(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


def test_the_loss_falls(whole):
    values = losses(whole[0])
    assert len(values) == FIT.steps
    assert np.mean(values[-8:]) < 0.7 * np.mean(values[:8])


def test_a_step_s_record_has_means_rate_and_norm(whole):
    record = next(record for record in records(whole[0]) if record["step"] == 3)
    assert len(record["first"]) == 2
    # The rate is that of the step's own update: the first one of a warm-up is 0.
    assert record["learning_rate"] == pytest.approx(float(schedule(FIT)(2)))
    assert record["gradient_norm"] > 0


def test_a_run_can_be_watched_from_its_log(whole, watched):
    assert [record["step"] for record in watched] == [6, 12, 18, 24]
    assert all("validation_loss" in record for record in watched)


def test_the_rate_warms_up_and_falls_to_a_tenth():
    rates = [float(schedule(FIT)(step)) for step in range(FIT.steps + 1)]
    assert rates[0] == 0
    assert rates[FIT.warmup] == max(rates) == pytest.approx(FIT.learning_rate)
    assert rates[-1] == pytest.approx(FIT.learning_rate / 10)


def test_vectors_are_not_decayed():
    weights = {"matrix": jnp.ones((2, 2)), "vector": jnp.ones(2)}
    optimizer = make_optimizer(dataclasses.replace(FIT, warmup=0, weight_decay=0.5))
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, weights), optimizer.init(weights), weights)
    np.testing.assert_array_equal(updates["vector"], 0)
    np.testing.assert_allclose(updates["matrix"], -0.5 * FIT.learning_rate, rtol=1e-6)


@pytest.mark.parametrize("looks", [[0], [7, 9], [22]])
def test_a_stopped_run_goes_on_bit_for_bit(whole, tmp_path, looks):
    for count in looks:
        with pytest.raises(OutOfTime, match=r"test: step \d+ of 24"):
            run(tmp_path, StopAfter(count))
    trained = run(tmp_path)
    assert records(tmp_path) == records(whole[0])
    same(trained, whole[1])


class Killed(BaseException):
    pass


def test_a_run_whose_newest_checkpoint_was_damaged_goes_on_from_the_one_before(whole, tmp_path, caplog):
    with pytest.raises(OutOfTime):
        run(tmp_path, StopAfter(12))
    shutil.rmtree(tmp_path / "checkpoints" / "13" / "state")
    trained = run(tmp_path)
    assert "13 is damaged" in caplog.text
    assert records(tmp_path) == records(whole[0])
    same(trained, whole[1])


def test_a_run_that_died_before_its_first_checkpoint_begins_anew(tmp_path):
    fit = dataclasses.replace(FIT, save_every=15)
    looks = iter([0, 0, Killed])

    def dying(weights):
        if next(looks) is Killed:
            raise Killed
        return score(weights)

    with pytest.raises(Killed):
        run(tmp_path / "killed", fit=fit, evaluate=dying, evaluate_first=True)
    for folder in ("killed", "whole"):
        run(tmp_path / folder, fit=fit, evaluate_first=True)
    assert records(tmp_path / "killed") == records(tmp_path / "whole")


def scripted(scores, seen):
    """Evaluations that give these scores, each at most once per set of weights."""
    scores = iter(scores)

    def evaluate(weights):
        value = next(scores)
        seen.append((value, jax.tree.map(np.asarray, weights)))
        if value is None:
            raise Killed
        return Evaluated({}, value)

    return evaluate


def test_the_first_of_the_highest_scores_is_kept(tmp_path):
    seen = []
    best = run(tmp_path, evaluate=scripted([-3.0, -1.0, -2.0, -1.0], seen))
    same(best.weights, seen[1][1])
    assert (best.step, best.score) == (12, -1.0)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("after", "wanted"),
    [
        # The evaluations of steps 18 and 24, done again from the checkpoint of step 15: as before,
        ([-1.0, -2.0], 18),
        # with scores as a device may give that is not deterministic: the weights that were best stay,
        ([-5.0, -5.0], 18),
        # or are beaten.
        ([-5.0, -0.5], 24),
    ],
)
def test_best_weights_after_the_last_checkpoint_stay_what_they_are(tmp_path, after, wanted):
    first, second = [], []
    fit = dataclasses.replace(FIT, save_every=15)
    with pytest.raises(Killed):
        run(tmp_path, evaluate=scripted([-4.0, -3.0, -1.0, None], first), fit=fit)
    best = run(tmp_path, evaluate=scripted(after, second), fit=fit)
    by_score = dict(first[:3] + second)
    assert best.step == wanted
    same(best.weights, by_score[best.score])
    assert best.score == max(by_score)


def test_the_best_weights_are_there_before_a_checkpoint_that_follows_them(tmp_path, monkeypatch):
    """Otherwise a run that was killed between the two would resume after its best weights, without them."""
    there, real = {}, checkpoints._Manager.write

    def write(self, step, args):
        if self.directory.name == "checkpoints":
            # Whatever is still being written now could be lost.
            there[step] = {path.name for path in (tmp_path / "best").iterdir()}
        real(self, step, args)

    monkeypatch.setattr(checkpoints._Manager, "write", write)
    fit = dataclasses.replace(FIT, save_every=6)
    run(tmp_path, evaluate=scripted([-4.0, -3.0, -2.0, -1.0], []), fit=fit)
    assert there == {6: {"1"}, 12: {"1", "2"}, 18: {"2", "3"}, 24: {"3", "4"}}


def test_a_run_whose_best_weights_were_damaged_makes_them_again(tmp_path):
    fit = dataclasses.replace(FIT, save_every=6)
    first = run(tmp_path, evaluate=scripted([-4.0, -3.0, -2.0, -1.0], []), fit=fit)
    before = records(tmp_path)
    shutil.rmtree(tmp_path / "best" / "4" / "weights")
    again = run(tmp_path, evaluate=scripted([-1.0], []), fit=fit)
    assert (again.step, again.score) == (24, -1.0)
    same(again.weights, first.weights)
    assert records(tmp_path) == before


def test_a_run_that_cannot_make_its_best_weights_again_ends_and_keeps_everything(tmp_path):
    """Its checkpoints are of later steps: it would end with the weights of step 0."""
    scores = [-2.0, -1.0, -3.0, -4.0, -5.0]
    run(tmp_path, evaluate=scripted(scores, []), evaluate_first=True)
    shutil.rmtree(tmp_path / "best" / "2" / "weights")
    before = sorted(tmp_path.glob("*/*"))
    for _ in range(2):
        with pytest.raises(TrainingCheckpointError, match=r"best/2 is damaged .*bring back a copy of"):
            run(tmp_path, evaluate=scripted([], []), evaluate_first=True)
        assert sorted(tmp_path.glob("*/*")) == before


def test_a_finished_run_is_only_read(whole):
    before = records(whole[0])
    again = run(whole[0], StopAfter(0), evaluate=scripted([None], []))
    same(again, whole[1])
    assert records(whole[0]) == before


def test_a_loss_that_is_no_number_stops_the_run_and_leaves_the_checkpoint_before(whole, tmp_path):
    class Breaks(Numbered):
        def __next__(self):
            batch = super().__next__()
            if self.position == 14:
                batch["x"][0, 0] = np.nan
            return batch

    with pytest.raises(NonFiniteLoss, match="the loss is nan at step 14"):
        run(tmp_path, batches=Breaks())
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest() == 10
    assert max(record["step"] for record in records(tmp_path)) == 13
    # The cause gone, the run goes on from there.
    trained = run(tmp_path)
    assert records(tmp_path) == records(whole[0])
    same(trained, whole[1])


@pytest.mark.parametrize("best", [False, wide(True)], ids=["state", "best"])
def test_a_full_disk_leaves_the_checkpoint_before_and_the_run_goes_on_once_there_is_room(
    tmp_path, monkeypatch, best
):
    width = 40_000
    # So many bytes of noise do not compress.
    noise = jax.random.normal(jax.random.key(1), (3, width))
    fit = dataclasses.replace(FIT, steps=9, save_every=3, evaluate_every=4 if best else 9)

    def wide(weights, frozen, batch, key):
        error = (weights["a"] - noise) * batch["x"][:1].T
        return {"loss": Mean(jnp.sum(error**2), jnp.float32(error.size))}

    def fill():
        # The checkpoint before is written in the background.
        until((tmp_path / "full" / "checkpoints" / "3").exists)
        stack.enter_context(files_of_at_most(100_000))

    def filling(weights):
        fill()
        return score(weights)

    class Fills(Numbered):
        def __next__(self):
            if self.position == 4 and not best:
                fill()
            return super().__next__()

    with contextlib.ExitStack() as stack:
        evaluate = filling if best else score
        with pytest.raises(
            TrainingCheckpointError, match="the one of step 3 is whole, and the same command goes on"
        ):
            run(tmp_path / "full", loss=wide, fit=fit, width=width, batches=Fills(), evaluate=evaluate)
    gc.collect()
    with Checkpoints(tmp_path / "full") as checkpoints:
        assert checkpoints.latest() == 3
    trained = run(tmp_path / "full", loss=wide, fit=fit, width=width)
    other = run(tmp_path / "whole", loss=wide, fit=fit, width=width)
    assert records(tmp_path / "full") == records(tmp_path / "whole")
    same(trained, other)


def test_parts_of_a_batch_add_up_to_the_whole_batch(tmp_path):
    def uneven(weights, frozen, batch, key):
        """As slots that have nothing to learn: rows weigh differently, and some nothing."""
        del key
        error = jnp.mean((batch["x"] @ weights["a"] - batch["x"] @ frozen) ** 2, axis=1)
        weight = jnp.maximum(batch["x"][:, 0], 0.0)
        return {"loss": Mean(jnp.sum(weight * error), jnp.sum(weight))}

    fit = dataclasses.replace(FIT, steps=3, batch=12, clip=1e9, warmup=0, evaluate_every=3)
    (one, first), (four, second) = (
        (run(folder, loss=uneven, fit=own, batches=Numbered(12)), records(folder))
        for folder, own in (
            (tmp_path / "one", fit),
            (tmp_path / "four", dataclasses.replace(fit, micro_batch=3)),
        )
    )
    for name in ("loss", "gradient_norm"):
        whole, parts = ([own[name] for own in found if name in own] for found in (first, second))
        assert len(whole) == 3
        np.testing.assert_allclose(whole, parts, rtol=1e-6)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-6), one.weights, four.weights)


def test_a_gradient_that_is_no_number_is_noticed_before_its_step_is_saved(tmp_path):
    """Its loss is finite: that of the next step would not be, but by then the weights are on the disk."""

    def broken(weights, frozen, batch, key):
        means = loss(weights, frozen, batch, key)
        # The square root of 0 has no derivative.
        bad = jnp.where(jax.random.uniform(key) < 0.1, 0.0, 1.0)
        total = means["loss"].total + 0.0 * jnp.sum(jnp.sqrt(bad * jnp.abs(weights["a"])))
        return {**means, "loss": means["loss"]._replace(total=total)}

    fit = dataclasses.replace(FIT, save_every=1, log_every=1)
    with pytest.raises(NonFiniteLoss, match="the gradient norm is nan at step") as failure:
        run(tmp_path, fit=fit, loss=broken)
    saved = max(int(path.name) for path in (tmp_path / "checkpoints").iterdir() if path.name.isdigit())
    assert f"at step {saved + 1};" in str(failure.value)


def test_the_first_weights_may_stay_the_best(tmp_path):
    seen = []

    def evaluate(weights):
        seen.append(jax.device_get(weights))
        return Evaluated({"validation_loss": 1.0}, -float(len(seen)))

    trained = run(tmp_path, evaluate=evaluate, evaluate_first=True)
    assert (trained.step, trained.score) == (0, -1.0)
    same(jax.device_get(trained.weights), seen[0])
    assert next(r["step"] for r in records(tmp_path) if "validation_loss" in r) == 0


def test_means_over_batches_are_weighted():
    batches = [({"x": np.ones((1, 3), np.float32)}, None), ({"x": np.zeros((3, 3), np.float32)}, None)]
    means = mean_of(loss, {"a": jnp.ones((3, 2))}, GOAL, iter(batches))
    row = 3 - np.sum(np.asarray(GOAL), axis=0)
    assert means["loss"] == pytest.approx(np.mean(row**2) / 4)
    np.testing.assert_allclose(means["first"], row / 4, rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "fit.steps must be at least 1, not 0"),
        ({"warmup": 24}, "fit.warmup must be below 24, the steps, not 24"),
        ({"learning_rate": -1.0, "weight_decay": -1.0}, "fit.learning_rate .*; fit.weight_decay must be at"),
        ({"micro_batch": 3}, "a batch of 4 sequences does not divide into micro-batches of 3 on 1 devices"),
    ],
)
def test_a_fit_that_cannot_be_is_refused_before_anything_is_written(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "new", fit=dataclasses.replace(FIT, **changes))
    assert not (tmp_path / "new").exists()


def test_a_batch_need_not_be_even():
    assert dataclasses.replace(FIT, batch=3).parts(1) == 1


def test_a_mesh_that_does_not_divide_the_devices_lists_those_that_would(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    with pytest.raises(ValueError, match=r"data -1 x fsdp 3 .* 8 devices; possible: data 8 x fsdp 1, data 4"):
        make_mesh(MeshSettings(fsdp=3))
    for shape in ((2, 2), (-1, 0), (-2, -4)):
        with pytest.raises(ValueError, match=r"possible: .*data 2 x fsdp 4, data 1 x fsdp 8"):
            make_mesh(MeshSettings(*shape))
    # Parts of the target that divide stay, and those that do not are told which would.
    with pytest.raises(
        ValueError, match=r"data 3 x fsdp 1 x expert 1 x tensor 2 does not .*: data 4 x fsdp 1 x e"
    ):
        make_mesh(MeshSettings(data=3, tensor=2))
    for parts in ({"tensor": 3}, {"tensor": 0}, {"expert": -2}, {"expert": 2, "tensor": 8}):
        with pytest.raises(ValueError, match=r"possible: expert x tensor of 1, 2, 4, 8$"):
            make_mesh(MeshSettings(**parts))


def test_a_target_is_not_shared_between_processes(monkeypatch):
    devices = [SimpleNamespace(process_index=i // 4) for i in range(8)]
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    monkeypatch.setattr(jax, "devices", lambda: devices)
    with pytest.raises(ValueError, match=r"x expert 2 x tensor 4 shares .* expert x tensor must divide 4$"):
        make_mesh(MeshSettings(expert=2, tensor=4))
