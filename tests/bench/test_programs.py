"""Programs of many kernels: compared with their references, and timed by the GPU's own clock."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from bench.common import programs
from bench.common.comparison import compare_jobs, compare_rows
from bench.common.kernel_trace import Kernel
from bench.common.programs import Program, kernel_micros, split_at_pauses, time_together


class TestComparison:
    def test_other_bits_at_the_second_call(self):
        out = np.ones((2, 3, 4, 16), np.float32)
        again = out.copy()
        again[1, 2, 3, 4] += 1e-6
        assert compare_rows(out, out, out, 1e-5) == (0.0, None)
        assert compare_rows(out, again, out, 1e-5) == (0.0, "a second call gives other bits")

    def test_a_row_that_sees_nothing_must_be_zero(self):
        expected = np.zeros((1, 2, 4, 16), np.float32)
        assert compare_rows(expected, expected, expected, 1e-5) == (0.0, None)
        error, problem = compare_rows(expected + 1e-9, expected, expected, 1e-5)
        assert error == np.inf
        assert "sequence 0, row 0 (100% of all rows)" in problem

    def test_what_does_not_run_is_a_problem(self):
        def fails(x):
            raise NotImplementedError("too large")

        job, rows = (partial(jnp.multiply, 1.0), (jnp.ones((2, 3)),)), (jnp.ones((2, 3)),)
        verdicts = compare_jobs([(fails, rows), job], [job, job], [1e-5] * 2, "title")
        assert verdicts == [(float("inf"), "does not run: too large"), (0.0, None)]
        with pytest.raises(NotImplementedError, match="too large"):
            compare_jobs([job], [(fails, rows)], [1e-5], "title")


class TestTimes:
    def test_a_gpus_own_clock_counts(self, monkeypatch):
        """The kernels that count in each program are looked for in programs of one kind at a time."""
        asked = []

        def micros(own, name):
            asked.append((len(own), name))
            return [{"a": 2.0, "b": 0.5} for _ in own]

        monkeypatch.setattr(programs, "on_gpu", lambda: True)
        monkeypatch.setattr(programs, "kernel_micros", micros)
        jobs = [(partial(jnp.add, 1), (jnp.zeros(3),))] * 3
        times = time_together(jobs, [4] * 3, [None, "choice", None], 1, "title")
        assert asked == [(2, None), (1, "choice")]
        assert all((own.micros, own.kernels) == (2.5, {"a": 2.0, "b": 0.5}) for own in times)
        assert all(own.wall > 0 for own in times)

    def test_pauses_tell_programs_apart(self):
        apart = programs.GAP_NS + 1
        kernels = [Kernel("b", 1000, 500), Kernel("a", 0, 2000), Kernel("c", 2000 + apart, 10)]
        groups = split_at_pauses(kernels)
        assert [[kernel.name for kernel in group] for group in groups] == [["a", "b"], ["c"]]
        assert split_at_pauses([]) == []

    def test_micros_of_a_layer(self, monkeypatch):
        program = Program(lambda: None, (), layers=2, dispatches=2)
        kernels = [
            *(Kernel("tree_attention_1", 0, duration) for duration in (90_000, 3000, 3000, 1000)),
            *(Kernel("tree_attention_merge", 0, 500) for _ in range(4)),
            Kernel("fusion", 0, 7000),
        ]
        monkeypatch.setattr(programs, "trace_apart", lambda runs: [kernels] * len(runs))
        # Four layers were launched; the slow first one does not count.
        named = {"tree_attention_1": 3.0, "tree_attention_merge": 0.5}
        assert kernel_micros([program] * 2, "tree_attention") == [named] * 2
        assert kernel_micros([program], None) == [{**named, "fusion": 1.75}]
        assert kernel_micros([], None) == []
        with pytest.raises(
            RuntimeError, match="no kernel in the trace is called 'mosaic'; there are: fusion, tree"
        ):
            kernel_micros([program], "mosaic")
