"""``python -m bench kernel`` on tiny shapes: wrong kernels are caught, and what is reported adds up."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.__main__ import main
from bench.common.floors import Work
from bench.kernel import cases as kernel_cases
from bench.kernel import check as kernel_check
from bench.kernel import command as kernel
from bench.kernel import speed as kernel_speed
from bench.kernel.cases import attend_by, chain, layer_call, layer_tables, random_block, random_pool
from bench.kernel.speed import AttentionCase, work_of
from pallas_kernels.dispatch import Implementation
from pallas_kernels.tree_attention import PagedPrefix, api, reference
from pallas_kernels.tree_attention.reference import unpack_mask
from pallas_kernels.tree_attention.shapes import AttentionShape

PLAIN = AttentionShape("plain", heads=4, kv_heads=2, head_size=16, page=16, rows=(1,), prefixes=(32, 64))
WINDOWED = replace(PLAIN, name="windowed", window=8, sinks=True, rows=(16,), prefixes=(32,))


@pytest.fixture(autouse=True)
def tiny_shapes(monkeypatch):
    monkeypatch.setattr(kernel, "SHAPES", (PLAIN, WINDOWED))
    monkeypatch.setattr(kernel, "ROWS", (5,))
    monkeypatch.setattr(kernel_speed, "OTHER_BYTES", 1 << 12)
    monkeypatch.setattr(kernel_speed, "GPU_BYTES", 1 << 12)


def plant(monkeypatch, change):
    """An implementation "planted": the reference, after ``change`` of its result for the given prefix."""

    def run(q, k, v, mask, prefix, **settings):
        return change(reference.tree_attention(q, k, v, mask, prefix, **settings), prefix).astype(q.dtype)

    monkeypatch.setitem(api.OPERATION.table, "planted", Implementation(run))


class TestReport:
    @pytest.mark.wide
    def test_every_case_has_a_time_and_a_floor(self, report_of):
        report = report_of("kernel", "--implementation xla --repeats 2 --seed 3 --batch 2")
        assert report["implementation"] == "xla"
        assert report["dtype"] == "bfloat16"
        assert report["seed"] == report["arguments"]["seed"] == 3
        assert all(value > 0 for value in report["ceilings"].values())

        names = [(row["shape"], row["rows"], row["prefix"]) for row in report["rows"]]
        assert names == [("plain", 1, 32), ("plain", 1, 64), ("windowed", 16, 32)]
        ceilings = report["ceilings"]
        for row in report["rows"]:
            seconds = max(row["bytes"] / ceilings["bandwidth"], row["operations"] / ceilings["matmul"])
            assert row["floor_us"] == pytest.approx(1e6 * seconds)
            assert row["floor_us"] > 0
            assert row["times_floor"] == pytest.approx(row["us"] / row["floor_us"])
            assert row["layers"] % kernel_cases.UNROLL == 0
            # The reference is compared with itself, and has no configuration.
            assert (row["xla_us"], row["times_faster"], row["config"]) == (row["us"], 1, None)
        for check in report["checks"]:
            assert 0 <= check["relative_error"] <= check["tolerance"]
        assert {check["dtype"] for check in report["checks"]} == {"bfloat16", "float32"}

    @pytest.mark.wide
    def test_the_reference_is_timed_beside_a_kernel(self, report_of, monkeypatch):
        plant(monkeypatch, lambda out, prefix: out)
        words = "--implementation planted --shapes plain --rows 5 --prefixes 40 --dtypes float32 --repeats 1"
        (row,) = report_of("kernel", words)["rows"]
        assert row["times_faster"] == pytest.approx(row["xla_us"] / row["us"])
        assert row["bytes"] == 4 * 2 * ((40 + 5) * 2 * 16 + 5 * 4 * 16)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ("", "pallas_triton cannot run: no GPU: the default device is a cpu"),
            ("--implementation mosaic", "--implementation must be one of pallas_triton, xla, not 'mosaic'"),
            ("--shapes gpt-9", "--shapes must be one of plain, windowed, not 'gpt-9'"),
            ("--prefixes 8 -1", "--prefixes must be at least 1, not -1"),
            ("--baselines xla", "--baselines is for --operation experts"),
        ],
    )
    @pytest.mark.skipif(jax.default_backend() != "cpu", reason="a GPU runs pallas_triton")
    def test_bad_arguments_are_named(self, arguments, message, refusal):
        assert message in refusal("kernel", *arguments.split())


class TestChecks:
    @pytest.mark.parametrize(
        ("change", "dtype", "message"),
        [
            (lambda out, prefix: out * 1.03, "bfloat16", "e-02, above 2e-02"),
            (lambda out, prefix: out * 1.00003, "float32", "relative error of 3.0e-05, above 1e-05"),
            # One row of one sequence that sees a long prefix: small beside the others.
            (lambda out, prefix: out.at[-1, 0].multiply(1.03), "bfloat16", "row 0"),
            (lambda out, prefix: out + 0 * prefix.k_pages.sum(), "bfloat16", "NaN or infinity"),
        ],
        ids=["bfloat16", "float32", "one row", "NaN"],
    )
    def test_a_wrong_kernel_is_not_timed(self, change, dtype, message, tmp_path, monkeypatch, capsys):
        plant(monkeypatch, change)
        monkeypatch.setattr(kernel, "time_shape", lambda *_: pytest.fail("timed"))
        monkeypatch.setattr(kernel, "measure_ceilings", lambda *_: pytest.fail("timed"))
        arguments = f"--implementation planted --shapes plain --rows 5 --prefixes 32 --dtypes {dtype}"
        assert main(["kernel", *arguments.split(), "--json", str(tmp_path / "k.json")]) == 1
        err = capsys.readouterr().err
        assert f"bench: planted is wrong: plain, {dtype}, 5 rows, prefixes of 0 1 7 15 16 32: " in err
        assert message in err
        assert "1 of 1 comparisons failed" in err
        assert not list(tmp_path.iterdir())

    def test_all_lengths_are_tried(self):
        checks = list(kernel_check.checks_of(WINDOWED, ("bfloat16", "float32"), (1, 5, 33, 64), (48, 256)))
        # Around a page of 16; 43 is beyond the window and in the midst of a page.
        ragged = (0, 1, 7, 15, 16, 43, 48)
        assert [check[1:4] for check in checks] == [
            *(("bfloat16", rows, ragged) for rows in (1, 5, 33, 64)),
            ("bfloat16", 5, (256,)),
            *(("float32", rows, ragged) for rows in (1, 33)),
            ("float32", 5, (256,)),
        ]


class TestCases:
    @pytest.mark.parametrize("rows", [1, 33, 300])
    def test_blocks_are_trees(self, rows):
        block = random_block(np.random.default_rng(0), rows, [0, rows // 4])
        np.testing.assert_array_equal(unpack_mask(jnp.asarray(block.mask)), block.seen)
        for seen, depths, padding in zip(block.seen, block.depths, (0, rows // 4), strict=True):
            real = rows - padding
            assert not seen[real:].any()
            assert not seen[:, real:].any()
            assert seen[:real, 0].all()
            np.testing.assert_array_equal(depths[:real], seen[:real].sum(axis=1) - 1)
            for i in range(real):
                # Whoever sees a row sees what that row sees; nobody sees a later row.
                assert not (seen[seen[i]] & ~seen[i]).any()
                assert not seen[i, i + 1 :].any()
        if rows == 300:
            np.testing.assert_array_equal(block.depths[0], np.arange(300))

    def test_nobody_may_read_anything_but_these(self):
        lengths = (0, 1, 16, 33)
        call = kernel_cases.ragged_call(np.random.default_rng(0), WINDOWED, 9, lengths, np.dtype(np.float32))
        tables, pages = np.asarray(call.prefix.block_tables), np.asarray(call.prefix.k_pages)
        read = np.concatenate(
            [
                pages[table[: -(-n // 16)]].reshape(-1, 2, 16)[:n]
                for table, n in zip(tables, lengths, strict=True)
            ]
        )
        assert np.isfinite(read).all()
        assert np.isfinite(pages).sum() == read.size == 50 * 2 * 16
        unseen = ~np.asarray(unpack_mask(call.mask)).any(axis=1)
        np.testing.assert_array_equal(np.isnan(np.asarray(call.v)).all(axis=(2, 3)), unseen)
        assert unseen.any()

    def test_tables_of_layers(self):
        order = np.random.default_rng(0).permutation(6)
        expected = order[np.asarray([[0, 1, 2, 3], [2, 3, 4, 5], [4, 5, 0, 1]])]
        np.testing.assert_array_equal(layer_tables(6, 3, 1, 4, 2)[:, 0], expected)
        assert np.unique(layer_tables(24, 3, 2, 4, 4)).size == 24

    def test_a_chain_is_one_layer_after_the_other(self):
        dtype = np.dtype(np.float32)
        pool = random_pool(WINDOWED, 24, dtype)
        tables = layer_tables(24, 8, 1, 3, 3)
        prefix = PagedPrefix(*pool, tables[0], jnp.asarray([37], jnp.int32))
        rng = np.random.default_rng(0)
        call = layer_call(rng, WINDOWED, random_block(rng, 5, [0]), prefix, dtype)
        attend = jax.jit(attend_by(WINDOWED, "xla"))
        last = jnp.zeros_like(call.q)
        for table in tables:
            last = attend(call._replace(q=call.q + last, prefix=replace(prefix, block_tables=table)))
        np.testing.assert_allclose(jax.jit(partial(chain, attend))(call, tables), last, atol=1e-5)


class TestWork:
    def test_a_token(self):
        # Two KV heads of 16, four query heads; 33 keys in bfloat16.
        expected = Work(2 * 2 * (33 * 2 * 16 + 4 * 16), 4 * 33 * 4 * 16)
        assert work_of(AttentionCase(PLAIN, 1, 32, 1, "bfloat16")) == expected
        # Seven of the prefix and itself.
        expected = Work(4 * 2 * 3 * (8 * 2 * 16 + 4 * 16), 3 * 4 * 8 * 4 * 16)
        assert work_of(AttentionCase(WINDOWED, 1, 32, 3, "float32")) == expected

    def test_a_prompt_chunk(self):
        work = work_of(AttentionCase(PLAIN, 300, 10, 1, "bfloat16"))
        assert work.bytes == 2 * 2 * (310 * 2 * 16 + 300 * 4 * 16)
        assert work.operations == 4 * (300 * 10 + 300 * 301 // 2) * 4 * 16
        work = work_of(AttentionCase(WINDOWED, 300, 10, 1, "bfloat16"))
        assert work.bytes == 2 * 2 * (307 * 2 * 16 + 300 * 4 * 16)
        # Every row sees eight, whether they are of the prefix or of the chunk.
        assert work.operations == 4 * 300 * 8 * 4 * 16
