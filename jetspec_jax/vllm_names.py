"""Names of vLLM's that do not exist here, and what there is instead: errors quote these sentences."""

_KINDS = "AsyncLLM.generate always gives what is new, and LLM.generate whole completions"
_POOLS = "models generate text alone"
#: Names of vLLM's modules.
IMPORTS = {
    "AsyncEngineArgs": "pass its settings to AsyncLLM itself, as AsyncLLM(model=…, max_model_len=…)",
    "EngineArgs": "pass its settings to LLM itself, as LLM(model=…, max_model_len=…)",
    "AsyncLLMEngine": "AsyncLLM serves requests that come at any time",
    "LLMEngine": "AsyncLLM serves requests that come at any time, and LLM serves lists of prompts",
    "RequestOutputKind": _KINDS,
    "TextPrompt": 'a prompt is a text or a dictionary, {"prompt": …}',
    "TokensPrompt": 'a prompt is a list of token ids or a dictionary, {"prompt_token_ids": …}',
    "GuidedDecodingParams": "use StructuredOutputsParams",
    "BeamSearchParams": "there is no beam search; SamplingParams(n=…) gives several completions",
    "PoolingParams": _POOLS,
}

_STATES = f"{_POOLS}; jetspec_jax.hidden_states gives the states to pool"
#: Attributes of vLLM's `LLM` and `AsyncLLM`.
ATTRIBUTES = {
    **dict.fromkeys(("classify", "embed", "reward", "score"), _STATES),
    "beam_search": IMPORTS["BeamSearchParams"],
    "from_engine_args": "pass its settings to the class itself, as LLM(model=…, max_model_len=…)",
    "from_vllm_config": "pass its settings to the class itself, as LLM(model=…, max_model_len=…)",
    "get_default_sampling_params": "SamplingParams() has the defaults; generation_config.json changes none",
    "get_metrics": "Completion.metrics has a request's figures, and AsyncLLM.stats() those of all requests",
    "llm_engine": IMPORTS["AsyncLLMEngine"],
}

_PROCESSORS = "requests say logit_bias, bad_words, allowed_token_ids or structured_outputs"
_CONFIG = "edit config.json in a copy of the checkpoint"
_ALWAYS = "leave it out: it is always on"
#: Arguments of vLLM's `LLM` and `AsyncEngineArgs`; commands quote them with the names of options.
ENGINE = {
    "async_scheduling": _ALWAYS,
    "block_size": "leave it out: a page holds 64 tokens",
    "compilation_config": "leave it out: warm_up() compiles what calls need",
    "convert": _POOLS,
    "cpu_offload_gb": "weights stay on the devices: tensor_parallel_size=… spreads them over several",
    "device": "set JAX_PLATFORMS=cpu or JAX_PLATFORMS=cuda in the environment",
    "distributed_executor_backend": "leave it out: join_processes() adds the devices of other hosts",
    "disable_log_stats": "leave it out: Completion.metrics and GET /metrics have the figures",
    "download_dir": "set HF_HOME in the environment, or give a folder as the model",
    "enable_chunked_prefill": _ALWAYS,
    "enable_expert_parallel": "say expert_parallel_size=…, the number of groups of experts",
    "enable_lora": "adapters are not read: merge them into the checkpoint",
    "enable_prefix_caching": _ALWAYS,
    "enforce_eager": "leave it out: everything is compiled, by warm_up() or by the first call",
    "generation_config": "only its end-of-sequence tokens are read; requests set their sampling",
    "gpu_memory_utilization": "set XLA_PYTHON_CLIENT_MEM_FRACTION in the environment, as 0.9",
    "hf_overrides": _CONFIG,
    "hf_token": "set HF_TOKEN in the environment",
    "kv_cache_dtype": "the cache always has the type of the weights",
    "limit_mm_per_prompt": "leave it out: prompts are text alone",
    "load_format": "safetensors, GGUF and Orbax checkpoints are recognised by their files",
    "logits_processors": _PROCESSORS,
    "max_logprobs": "leave it out: it is 20",
    "max_num_batched_tokens": "leave it out: chunks of prompts have the sizes that suit the device",
    "num_speculative_tokens": "say budget=…, the nodes of a tree, and depth=…, its longest path",
    "override_generation_config": "requests set their sampling: SamplingParams(…)",
    "override_pooler_config": _POOLS,
    "per_request_spec_decode_metrics": "leave it out: Completion has accept_lengths and tree_depths",
    "pipeline_parallel_size": "say tensor_parallel_size=…: layers are not split into stages",
    "quantization": "FP8, MXFP4 and GGUF checkpoints say themselves how they are quantised; others stay wide",
    "revision": "give a folder with that revision as the model",
    "rope_scaling": _CONFIG,
    "rope_theta": _CONFIG,
    "runner": _POOLS,
    "seed": "each request has its own: SamplingParams(seed=…), or seed in a body of the server",
    "speculative_config": "say draft_head=…, budget=…, width=…, depth=… and algorithm=…",
    "swap_space": "leave it out: a request that loses its pages is prefilled again",
    "structured_outputs_config": "llguidance is the one library of grammars; each request sets its options",
    "task": _POOLS,
    "tokenizer_mode": "the tokenizer is always a fast one",
    "trust_remote_code": "code of checkpoints is never run",
}

#: Options of ``vllm serve`` beside those of its engine.
SERVE = {
    "api_server_count": "leave it out: one process answers all requests",
    "chat_template_content_format": "the template's source decides it",
    "disable_log_requests": "leave it out: texts of requests are never logged",
    "enable_auto_tool_choice": "leave it out: tool_call_parser=… is enough",
    "enable_per_request_metrics": "leave it out: metrics of an answer always has the times",
    "enable_log_requests": "leave it out: texts of requests are never logged",
    "lora_modules": ENGINE["enable_lora"],
    "ssl_certfile": "serve TLS by a proxy in front",
    "ssl_keyfile": "serve TLS by a proxy in front",
}

#: Short options of ``vllm serve``, and what they stand for.
SHORT_OPTIONS = {
    "-dp": "--data-parallel-size",
    "-ep": "--enable-expert-parallel",
    "-pp": "--pipeline-parallel-size",
    "-q": "--quantization",
    "-sc": "--speculative-config",
    "-tp": "--tensor-parallel-size",
}

#: Arguments of vLLM's `SamplingParams`.
SAMPLING = {
    "best_of": "say n=… and logprobs=0, and choose among the completions by cumulative_logprob",
    "detokenize": "a target with a tokenizer always gives text",
    "do_sample": "temperature=0 chooses the likeliest token, and a larger one samples",
    "guided_decoding": "say structured_outputs=StructuredOutputsParams(…)",
    "length_penalty": "there is no beam search",
    "logprob_token_ids": "jetspec_jax.logits gives the logits of all tokens",
    "logits_processors": _PROCESSORS,
    "output_kind": _KINDS,
    "num_beams": "there is no beam search; n=… gives several completions",
    "spaces_between_special_tokens": "texts are decoded as the tokenizer does",
    "truncate_prompt_tokens": "cut the list of token ids that is the prompt",
    "use_beam_search": "there is no beam search; n=… gives several completions",
}

#: Arguments of vLLM's `StructuredOutputsParams`.
STRUCTURED = {
    "disable_fallback": "leave it out: there is one library of grammars, llguidance",
    "structural_tag": "say grammar=…",
    "whitespace_pattern": "say disable_any_whitespace=True, or write the form as a grammar",
}

#: Arguments of vLLM's `generate` and `chat`.
CALLS = {
    "chat_template": "all chats of an LLM have one template: LLM(chat_template=…)",
    "chat_template_content_format": SERVE["chat_template_content_format"],
    "data_parallel_rank": "leave it out: the copy with the least work serves a request",
    "lora_request": "adapters are not read: merge them into the checkpoint",
    "mm_processor_kwargs": "prompts are text alone",
    "prompt_token_ids": 'give token ids as a prompt: {"prompt_token_ids": […]}',
    "priority": "AsyncLLM.generate has it; LLM serves prompts in their order",
    "tokenization_kwargs": 'encode the text yourself, by get_tokenizer(), and give {"prompt_token_ids": […]}',
}
