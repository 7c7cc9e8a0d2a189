"""The training log: what is written when, what a resumed run keeps, and what TensorBoard reads."""

import json
import math
import os
import struct
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboardX.proto import event_pb2
from tensorboardX.record_writer import masked_crc32c

import train.loop.log
from tests.train.full_disk import files_of_at_most
from train.loop.log import NonFiniteLoss, TrainingLog, peak_memory_gib, read_log
from train.loop.stages import OutOfTime


def metrics(loss, **others):
    return {"loss": jnp.float32(loss), **others}


def events(folder):
    """Every event of a folder, in the order in which TensorBoard reads them."""
    found = []
    for path in sorted((folder / "tensorboard").iterdir()):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            record, data = data[: 16 + length], data[16 + length :]
            crcs = struct.unpack("<I", record[8:12]) + struct.unpack("<I", record[-4:])
            assert crcs == (masked_crc32c(record[:8]), masked_crc32c(record[12:-4]))
            found.append(event_pb2.Event.FromString(record[12:-4]))
    return found


def shown(folder):
    """What TensorBoard shows, ``{tag: [(step, value), ...]}``: a start purges its step and the later ones."""
    scalars = {}
    for event in events(folder):
        if event.session_log.status == event_pb2.SessionLog.START:
            scalars = {tag: [(s, x) for s, x in rows if s < event.step] for tag, rows in scalars.items()}
        for value in event.summary.value:
            scalars.setdefault(value.tag, []).append((event.step, value.simple_value))
    return scalars


class Lazy:
    """An array of a device that counts how often it is waited for."""

    def __init__(self, value):
        self.value, self.fetched = value, 0

    def __array__(self, dtype=None, copy=None):
        self.fetched += 1
        return np.asarray(self.value, np.float32)


class Clock:
    def __init__(self, monkeypatch):
        self.now = 100.0
        time = SimpleNamespace(perf_counter=lambda: self.now, time=lambda: 1.0, time_ns=lambda: 1)
        monkeypatch.setattr(train.loop.log, "time", time)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def run(folder, kept, last, shift=0.0):
    """Logs the steps after ``kept`` up to ``last``, with an evaluation after each even one."""
    with TrainingLog(folder, kept_steps=kept) as log:
        for step in range(kept + 1, last + 1):
            log.add(step, metrics(step + shift, accuracy_by_depth=jnp.array([0.5, 0.25])), 8)
            if step % 2 == 0:
                log.write("evaluation", step, {"validation_loss": step + shift, "tau": {"16": 2.0 + shift}})


class TestFlush:
    def test_nothing_is_waited_for_before_and_everything_at_once(self, tmp_path, monkeypatch):
        calls = []
        fetch = jax.device_get
        monkeypatch.setattr(jax, "device_get", lambda x: calls.append(1) or fetch(x))
        arrays = [Lazy(3.0), Lazy(2.0), Lazy(1.0)]
        with TrainingLog(tmp_path, kept_steps=0) as log:
            assert math.isnan(log.flush())
            for step, array in enumerate(arrays, 1):
                log.add(step, {"loss": array}, 8)
            assert [array.fetched for array in arrays] == [0, 0, 0]
            assert read_log(tmp_path / "log.jsonl") == []
            assert log.flush() == 1.0
            assert [array.fetched for array in arrays] == [1, 1, 1]
            assert len(calls) == 1
            assert log.flush() == 1.0
            assert len(calls) == 1
            # It is on the disk already, for TensorBoard too.
            assert [record["loss"] for record in read_log(tmp_path / "log.jsonl")] == [3.0, 2.0, 1.0]
            assert shown(tmp_path)["train/loss"] == [(1, 3.0), (2, 2.0), (3, 1.0)]
        first, start, *_ = events(tmp_path)
        assert (first.file_version, start.step) == ("brain.Event:2", 1)

    def test_other_processes_write_nothing_and_return_the_same_loss(self, tmp_path):
        with TrainingLog(tmp_path / "run", kept_steps=0, main=False) as log:
            log.add(1, metrics(2.0), 8)
            with log.paused():
                log.write("validation", 1, {"validation_loss": 1.0})
            log.add(2, metrics(1.5), 8)
            assert log.flush() == 1.5
        assert not (tmp_path / "run").exists()

    def test_a_record_has_what_was_given_in_its_order_and_what_is_measured(self, tmp_path):
        with TrainingLog(tmp_path, kept_steps=0) as log:
            log.add(1, metrics(0.1, by_depth=jnp.array([1.0, 0.5]), at=jnp.int32(3)), 8)
        [record] = read_log(tmp_path / "log.jsonl")
        assert list(record)[:4] == ["step", "loss", "by_depth", "at"]
        assert list(record)[4:] == ["seconds", "tokens_per_second", "memory_gib"]
        assert record["by_depth"] == [1.0, 0.5]
        assert record["at"] == 3
        assert record["seconds"] > 0
        assert record["tokens_per_second"] == pytest.approx(8 / record["seconds"], rel=0.1)

    def test_counts_are_logged_as_they_are_and_by_the_second(self, tmp_path, clock):
        with TrainingLog(tmp_path, kept_steps=0) as log:
            log.add(1, metrics(0.1, real_tokens=jnp.int32(300), distinct_anchors=jnp.int32(12)), 400)
            clock.now += 2.0
            log.flush()
        [record] = read_log(tmp_path / "log.jsonl")
        assert (record["real_tokens"], record["distinct_anchors"]) == (300, 12)
        assert record["tokens_per_second"] == 200.0
        assert record["real_tokens_per_second"] == 150.0
        assert record["distinct_anchors_per_second"] == 6.0
        assert "learnable_tokens_per_second" not in record

    @given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=8))
    def test_the_file_has_every_float32_exactly(self, tmp_path_factory, values):
        folder = tmp_path_factory.mktemp("log")
        exact = np.array(values, np.float32)
        half = exact.astype(jnp.bfloat16)
        half = np.where(np.isfinite(half.astype(np.float32)), half, 0).astype(jnp.bfloat16)
        with TrainingLog(folder, kept_steps=0) as log:
            log.add(1, metrics(exact[0], exact=exact, half=half), 8)
        [record] = read_log(folder / "log.jsonl")
        assert np.float32(record["loss"]) == exact[0]
        np.testing.assert_array_equal(np.array(record["exact"], np.float32), exact)
        np.testing.assert_array_equal(np.array(record["half"]).astype(jnp.bfloat16), half)

    def test_leaving_writes_what_is_pending_unless_an_error_is_the_reason(self, tmp_path):
        with TrainingLog(tmp_path, kept_steps=0) as log:
            log.add(1, metrics(1.0), 8)
        array = Lazy(1.0)

        def fail():
            with TrainingLog(tmp_path, kept_steps=1) as log:
                log.add(2, {"loss": array}, 8)
                raise KeyError

        with pytest.raises(KeyError):
            fail()
        assert [record["step"] for record in read_log(tmp_path / "log.jsonl")] == [1]
        assert array.fetched == 0


class TestTime:
    def test_a_flush_shares_its_time_among_its_steps_without_the_pauses(self, tmp_path, clock):
        with TrainingLog(tmp_path, kept_steps=0) as log:
            log.add(1, metrics(1.0), 300)
            clock.now += 1.0
            log.add(2, metrics(1.0), 600)
            clock.now += 2.0
            log.flush()
            log.add(3, metrics(1.0), 300)
            clock.now += 5.0
            with log.paused():  # the step before it is written first, so its time is its own
                clock.now += 1000.0
                log.write("evaluation", 3, {"validation_loss": 1.0})
            clock.now += 0.5
            log.add(4, metrics(1.0), 300)
            log.flush()
            log.add(5, metrics(1.0), 8)  # the clock stands still, and nothing is divided by 0
        steps = [record for record in read_log(tmp_path / "log.jsonl") if "loss" in record]
        assert [record["seconds"] for record in steps] == [1.5, 1.5, 5.0, 0.5, 0.0]
        assert [record["tokens_per_second"] for record in steps[:4]] == [200.0, 400.0, 60.0, 600.0]
        assert math.isfinite(steps[4]["tokens_per_second"])


class TestMemory:
    def test_it_is_the_devices_peak_where_the_device_tells_it(self, monkeypatch):
        device = SimpleNamespace(memory_stats=lambda: {"bytes_in_use": 5, "peak_bytes_in_use": 3 * 2**29})
        monkeypatch.setattr(jax, "local_devices", lambda: [device])
        assert peak_memory_gib() == 1.5

    @pytest.mark.parametrize("stats", [None, {}])
    def test_else_that_of_the_process(self, monkeypatch, stats):
        monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(memory_stats=lambda: stats)])
        block = np.ones(2**27, np.uint8)  # 1/8 GiB, touched: the peak cannot be below it
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        assert block.nbytes / 2**30 < peak_memory_gib() < machine


class TestNonFinite:
    @pytest.mark.parametrize(("bad", "main"), [(math.nan, True), (-math.inf, True), (math.inf, False)])
    def test_the_steps_before_are_written_and_it_and_later_ones_are_not(self, tmp_path, bad, main):
        folder = tmp_path / "run"

        def fail():
            with TrainingLog(folder, kept_steps=0, main=main) as log:
                for step, loss in enumerate([5.0, 4.0, bad, 3.0, math.nan], 1):
                    log.add(step, metrics(loss), 8)
                with pytest.raises(FloatingPointError, match="at step 3"):
                    log.flush()
                log.write("validation", 5, {"validation_loss": 1.0})

        with pytest.raises(NonFiniteLoss, match=rf"{bad} at step 3"):
            fail()
        if main:
            assert [record["step"] for record in read_log(folder / "log.jsonl")] == [1, 2]
            assert shown(folder)["train/loss"] == [(1, 5.0), (2, 4.0)]
        else:
            assert not folder.exists()

    def test_a_pause_finds_it_before_its_work_begins(self, tmp_path):
        def evaluate():
            with TrainingLog(tmp_path, kept_steps=0) as log:
                log.add(1, metrics(math.nan), 8)
                with log.paused():
                    pytest.fail("the evaluation began")

        with pytest.raises(NonFiniteLoss):
            evaluate()

    def test_other_numbers_may_be_and_the_file_stays_strict_json(self, tmp_path):
        with TrainingLog(tmp_path, kept_steps=0) as log:
            log.add(1, metrics(1.0, other_norm=jnp.inf, by_depth=jnp.array([0.5, jnp.nan])), 8)
            log.write("evaluation", 1, {"tau": {"16": math.nan, "64": np.float32(2.5)}})
        text = (tmp_path / "log.jsonl").read_text()
        step, evaluation = (json.loads(line, parse_constant=pytest.fail) for line in text.splitlines())
        assert step["other_norm"] is None
        assert step["by_depth"] == [0.5, None]
        assert evaluation["tau"] == {"16": None, "64": 2.5}
        assert "train/other_norm" not in shown(tmp_path)


def test_a_full_disk_is_an_error_that_names_the_folder(tmp_path):
    log = TrainingLog(tmp_path, kept_steps=0)
    log.write("evaluation", 1, {"tau": 1.0})
    with files_of_at_most(100):
        with pytest.raises(OSError, match="too large") as failure:
            log.write("evaluation", 2, {"tau": [1.0] * 100})
        with pytest.raises(OSError, match="too large"), log:
            pass  # what could not be written is tried again
    assert failure.value.filename == str(tmp_path)


class TestResume:
    @pytest.mark.parametrize("kept", [0, 4, 7])
    def test_later_steps_are_dropped_and_done_again(self, tmp_path, kept):
        path = tmp_path / "log.jsonl"
        run(tmp_path, 0, 7)
        before = path.read_bytes().splitlines(keepends=True)
        earlier = [line for line in before if json.loads(line)["step"] <= kept]
        with TrainingLog(tmp_path, kept_steps=kept):
            assert path.read_bytes() == b"".join(earlier)
        run(tmp_path, kept, 8, shift=0.5)

        steps = [record for record in read_log(path) if "loss" in record]
        evaluations = [record for record in read_log(path) if "tau" in record]
        expected = [(step, step + 0.5 * (step > kept)) for step in range(1, 9)]
        assert [(record["step"], record["loss"]) for record in steps] == expected
        assert [(r["step"], r["validation_loss"]) for r in evaluations] == expected[1::2]
        # TensorBoard shows what the file has, although it read the first run's events as well.
        scalars = shown(tmp_path)
        assert scalars["train/loss"] == expected
        assert scalars["validation/loss"] == expected[1::2]
        assert len(list((tmp_path / "tensorboard").iterdir())) == 3
        assert not list(tmp_path.glob("*.partial"))

    def test_a_last_line_that_was_cut_off_is_dropped_wherever_that_was(self, tmp_path):
        path = tmp_path / "log.jsonl"
        run(tmp_path, 0, 2)
        *kept, last = path.read_bytes().splitlines(keepends=True)
        for cut in range(1, len(last) - 1):
            path.write_bytes(b"".join(kept) + last[:cut])
            assert len(read_log(path)) == len(kept)
            with TrainingLog(tmp_path, kept_steps=9):
                assert path.read_bytes() == b"".join(kept)
        # Where only the end of the line is missing, the record is whole and is kept.
        path.write_bytes(b"".join([*kept, last])[:-1])
        run(tmp_path, 2, 3)
        assert [record["step"] for record in read_log(path)] == [1, 2, 2, 3]

    @pytest.mark.parametrize(
        "line",
        [
            b'{"step": 2, "loss"',
            b'{"step": 2, "loss": NaN}',
            b"",
            b"[" * 100_000,
        ],
    )
    def test_any_other_damage_is_named_and_nothing_is_touched(self, tmp_path, line):
        path = tmp_path / "log.jsonl"
        data = b'{"step": 1, "loss": 1.0}\n' + line + b'\n{"step": 3, "loss": 1.0}\n'
        path.write_bytes(data)
        with pytest.raises(ValueError, match=r"log\.jsonl, line 2 is not a record"):
            read_log(path)
        with pytest.raises(ValueError, match=r"log\.jsonl, line 2 is not a record"):
            TrainingLog(tmp_path, kept_steps=1)
        assert path.read_bytes() == data
        assert [child.name for child in tmp_path.iterdir()] == ["log.jsonl"]

    @pytest.mark.parametrize("last", [bytes(20), b"\x89PNG", b"[1", b'{"loss": 1.0, "st'])
    def test_what_cannot_be_the_beginning_of_a_record_is_no_last_line_that_was_cut_off(self, tmp_path, last):
        path = tmp_path / "log.jsonl"
        path.write_bytes(b'{"step": 1, "loss": 1.0}\n' + last)
        with pytest.raises(ValueError, match=r"line 2 is not a record .*; each line should be .* Remove"):
            read_log(path)

    @pytest.mark.parametrize(("owner", "name"), [(os, "fsync"), (Path, "rename")])
    def test_the_file_is_rewritten_whole_or_not_at_all(self, tmp_path, monkeypatch, owner, name):
        run(tmp_path, 0, 4)
        before = (tmp_path / "log.jsonl").read_bytes()

        def fail(*_):
            raise OSError("no space left")

        monkeypatch.setattr(owner, name, fail)
        with pytest.raises(OSError, match="no space"):
            TrainingLog(tmp_path, kept_steps=2)
        assert (tmp_path / "log.jsonl").read_bytes() == before


class TestTensorBoard:
    def test_numbers_are_scalars_and_lists_are_one_scalar_per_element(self, tmp_path):
        with TrainingLog(tmp_path, kept_steps=0) as log:
            log.add(1, metrics(2.0, accuracy_by_depth=jnp.array([0.5, 0.25])), 8)
            log.write(
                "evaluation",
                1,
                {"validation_loss": 3.0, "tau": {"16": 2.5, "64": [1.0, 2.0]}, "device": "cpu", "none": None},
            )
        scalars = shown(tmp_path)
        measured = {f"train/{name}" for name in ("seconds", "tokens_per_second", "memory_gib")}
        assert {tag: rows for tag, rows in scalars.items() if tag not in measured} == {
            "train/loss": [(1, 2.0)],
            "train/accuracy_by_depth/1": [(1, 0.5)],
            "train/accuracy_by_depth/2": [(1, 0.25)],
            "validation/loss": [(1, 3.0)],
            "evaluation/tau/16": [(1, 2.5)],
            "evaluation/tau/64/1": [(1, 1.0)],
            "evaluation/tau/64/2": [(1, 2.0)],
        }
        assert measured <= scalars.keys()
        assert read_log(tmp_path / "log.jsonl")[1]["device"] == "cpu"


class Remote:
    def __init__(self):
        self.rows, self.failed = [], None

    def log(self, rows):
        self.rows += rows

    def close(self, failed):
        self.failed = failed


class TestTrackers:
    def test_they_get_what_tensorboard_shows_but_no_source_s_name(self, tmp_path):
        remote = Remote()
        by_source = {"mine.jsonl": {"0.0": {"16": 2.0}}, "o/n:train": {"0.0": {"16": 3.0}}}
        with TrainingLog(tmp_path, kept_steps=0, trackers=lambda: [remote]) as log:
            log.add(1, metrics(2.0, accuracy_by_depth=jnp.array([0.5, math.nan])), 8)
            log.write("evaluation", 1, {"tau": {"16": 2.5}, "tau_by_source": by_source, "device": "x"})
        merged = {}
        for step, values in remote.rows:
            assert step == 1
            merged |= values
        assert "train/accuracy_by_depth/2" not in merged
        assert merged["evaluation/tau_by_source/1/0.0/16"] == 2.0
        assert merged["evaluation/tau_by_source/2/0.0/16"] == 3.0
        assert not any("mine" in tag or "o/n" in tag for tag in merged)
        scalars = shown(tmp_path)
        assert scalars["evaluation/tau_by_source/mine.jsonl/0.0/16"] == [(1, 2.0)]
        same = {tag for tag in scalars if "by_source" not in tag}
        assert same == {tag for tag in merged if "by_source" not in tag}
        assert remote.failed is False

    @pytest.mark.parametrize(("error", "failed"), [(OutOfTime("x"), False), (ValueError("x"), True)])
    def test_they_hear_whether_the_run_failed(self, tmp_path, error, failed):
        remote = Remote()
        with pytest.raises(type(error)), TrainingLog(tmp_path, kept_steps=0, trackers=lambda: [remote]):
            raise error
        assert remote.failed is failed

    def test_a_loss_that_is_not_finite_fails_the_run_at_its_end_too(self, tmp_path):
        remote = Remote()
        with (
            pytest.raises(NonFiniteLoss),
            TrainingLog(tmp_path, kept_steps=0, trackers=lambda: [remote]) as log,
        ):
            log.add(1, metrics(math.inf), 8)
        assert remote.failed is True

    def test_one_that_cannot_be_opened_leaves_no_file_open(self, tmp_path):
        def refuse():
            raise RuntimeError("wandb cannot begin a run")

        with pytest.raises(RuntimeError, match="wandb cannot"):
            TrainingLog(tmp_path, kept_steps=0, trackers=refuse)

    def test_other_processes_open_none(self, tmp_path):
        with TrainingLog(tmp_path, kept_steps=0, main=False, trackers=lambda: 1 / 0):
            pass
