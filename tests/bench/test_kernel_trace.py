"""What ran on a GPU, out of a trace: which kernels count, their classes, and their sums."""

import jax
import pytest

from bench.common.kernel_trace import Kernel, classify, kernels_of, summarise


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_128x8_64x12_2x1_v_bz_splitK_TNT", "matmul"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64_warpgroupsize1x1x1", "matmul"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu>(Params)", "matmul"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>(...)", "matmul"),
        ("void gemvNSP_kernel<__nv_bfloat16, float, 1, 16>(...)", "matmul"),
        ("void dot_kernel<float, 128, 0>(...)", "matmul"),
        ("gemm_fusion_dot_general_12", "matmul"),
        ("fusion_dot_3", "matmul"),
        ("tree_attention", "tree attention"),
        ("tree_attention_merge", "tree attention"),
        ("tree_growth", "tree growth"),
        ("void raft::matrix::detail::select::radix::radix_topk_kernel<float>", "top-k, sort"),
        ("void cub::DeviceRadixSortOnesweepKernel<float>(...)", "top-k, sort"),
        ("sort_7_1", "top-k, sort"),
        ("input_scatter_fusion_2", "commit, scatter"),
        ("loop_dynamic_update_slice_fusion", "commit, scatter"),
        ("paged_write", "commit, scatter"),
        ("triton_softmax_14", "norm, rotary, softmax"),
        ("loop_multiply_rsqrt_fusion", "norm, rotary, softmax"),
        ("rms_norm", "norm, rotary, softmax"),
        ("qkv_rotary", "norm, rotary, softmax"),
        ("gated_activation", "element-wise"),
        ("expert_mlp_hidden", "experts"),
        ("input_reduce_fusion_1", "reduce, argmax"),
        ("wrapped_reduce", "reduce, argmax"),
        ("MemcpyD2D", "copy, memset"),
        ("Memset", "copy, memset"),
        ("copy_fusion", "copy, memset"),
        ("wrapped_transpose", "copy, memset"),
        ("loop_gather_fusion", "gather"),
        ("loop_add_fusion_3", "element-wise"),
        ("fusion_31", "element-wise"),
        ("wrapped_convert", "element-wise"),
        ("set_while_condition_kernel", "other"),
    ],
)
def test_kernels_have_classes(name, kind):
    assert classify(name) == kind


def test_only_streams_of_gpus_are_read():
    """Lines that XLA derives from the streams would count the same time twice."""
    text = """
        planes { name: "/host:CPU"
          lines { name: "python" events { metadata_id: 1 duration_ps: 9000 } }
          event_metadata { key: 1 value { id: 1 name: "host work" } } }
        planes { name: "/device:GPU:0"
          lines { name: "Stream #20(Compute)" timestamp_ns: 100
            events { metadata_id: 1 offset_ps: 1000000 duration_ps: 2000000 }
            events { metadata_id: 2 offset_ps: 4000000 duration_ps: 3000000 } }
          lines { name: "Stream #21(MemcpyD2D)" timestamp_ns: 100
            events { metadata_id: 3 offset_ps: 6000000 duration_ps: 2000000 } }
          lines { name: "XLA Ops" timestamp_ns: 100
            events { metadata_id: 2 offset_ps: 1000000 duration_ps: 6000000 } }
          lines { name: "Steps" events { metadata_id: 4 duration_ps: 7000000 } }
          event_metadata { key: 1 value { id: 1 name: "gemm_fusion_dot_1" } }
          event_metadata { key: 2 value { id: 2 name: "loop_add_fusion" } }
          event_metadata { key: 3 value { id: 3 name: "MemcpyD2D" } }
          event_metadata { key: 4 value { id: 4 name: "1" } } }
    """
    data = jax.profiler.ProfileData.from_serialized_xspace(
        jax.profiler.ProfileData.text_proto_to_serialized_xspace(text)
    )
    kernels = kernels_of(data)
    assert [(kernel.name, kernel.duration_ns) for kernel in kernels] == [
        ("gemm_fusion_dot_1", 2000),
        ("loop_add_fusion", 3000),
        ("MemcpyD2D", 2000),
    ]
    assert [kernel.start_ns - kernels[0].start_ns for kernel in kernels] == [0, 3000, 5000]


def test_time_and_launches_per_round():
    kernels = [
        Kernel("nvjet_a", 0, 4000),
        Kernel("fusion_1", 4000, 1000),
        Kernel("MemcpyD2D", 4500, 2500),  # beside the fusion
        Kernel("nvjet_a", 10_000, 2000),
    ]
    found = summarise(kernels, rounds=2)
    assert found["classes"] == {
        "matmul": {"us": 3.0, "launches": 1.0},
        "copy, memset": {"us": 1.25, "launches": 0.5},
        "element-wise": {"us": 0.5, "launches": 0.5},
    }
    assert (found["launches"], found["busy_us"], found["idle_us"]) == (2.0, 4.5, 1.5)
    assert [(part["kernel"], part["us"], part["mean_us"]) for part in found["top"]] == [
        ("nvjet_a", 3.0, 3.0),
        ("MemcpyD2D", 1.25, 2.5),
        ("fusion_1", 0.5, 1.0),
    ]
