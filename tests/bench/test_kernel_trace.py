"""What ran on a GPU, out of a trace: which kernels count, their classes, and their sums."""

import jax

from bench.common.kernel_trace import Kernel, classify, kernels_of, summarise

# By class: of each way to be told one name, and of all those that another class's pattern would take too.
NAMES = {
    "collectives": (
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "psum_798_0_fusion_1",
    ),
    "matmul": (
        "nvjet_tst_128x8_64x12_2x1_v_bz_splitK_TNT",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64_warpgroupsize1x1x1",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu>(Params)",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float>(...)",
        "void gemvNSP_kernel<__nv_bfloat16, float, 1, 16>(...)",
        "void dot_kernel<float, 128, 0>(...)",
        "gemm_fusion_dot_general_12",
        "fusion_dot_3",
    ),
    "tree attention": ("tree_attention", "tree_attention_merge"),
    "tree growth": ("tree_growth",),
    "experts": ("expert_mlp_hidden",),
    "top-k, sort": (
        "void raft::matrix::detail::select::radix::radix_topk_kernel<float>",
        "void cub::DeviceRadixSortOnesweepKernel<float>(...)",
        "sort_7_1",
    ),
    "commit, scatter": ("input_scatter_fusion_2", "loop_dynamic_update_slice_fusion", "paged_write"),
    "norm, rotary, softmax": ("triton_softmax_14", "loop_multiply_rsqrt_fusion", "rms_norm", "qkv_rotary"),
    "reduce, argmax": ("input_reduce_fusion_1", "wrapped_reduce"),
    "copy, memset": ("MemcpyD2D", "Memset", "copy_fusion", "wrapped_transpose"),
    "gather": ("loop_gather_fusion",),
    "element-wise": (
        "gated_activation",
        "quantize_rows",
        "loop_add_fusion_3",
        "fusion_31",
        "wrapped_convert",
    ),
    "other": ("set_while_condition_kernel",),
}


def test_kernels_have_classes():
    found = {kind: tuple(name for name in names if classify(name) == kind) for kind, names in NAMES.items()}
    assert found == NAMES


def test_only_streams_of_the_first_gpu_are_read():
    """Lines that XLA derives from the streams would count the same time twice, and so would other GPUs."""
    text = """
        planes { name: "/host:CPU"
          lines { name: "python" events { metadata_id: 1 duration_ps: 9000 } }
          event_metadata { key: 1 value { id: 1 name: "host work" } } }
        planes { name: "/device:GPU:1"
          lines { name: "Stream #22(Compute)" timestamp_ns: 100
            events { metadata_id: 1 offset_ps: 1000000 duration_ps: 2500000 } }
          event_metadata { key: 1 value { id: 1 name: "gemm_fusion_dot_1" } } }
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
