"""Rows of features that AFD serves, each with the test that shows it."""

from __future__ import annotations

from sglang_afd.features.row import Feature, Switch, served

_FEATURES = "integration/test_features.py::"
_ENDPOINTS = "integration/test_endpoints.py::"

SERVED: tuple[Feature, ...] = (
    served(
        "OpenAI API (completions, chat)",
        _FEATURES + "test_openai_api",
        requests=("/v1/completions", "/v1/chat/completions"),
    ),
    served("Streaming", _FEATURES + "test_streaming", requests=("stream",)),
    served(
        "Sampling parameters",
        _FEATURES + "test_sampling",
        requests=("temperature", "top_p", "top_k", "min_p", "sampling_seed"),
    ),
    served("Stop strings", _FEATURES + "test_stop_strings", requests=("stop",)),
    served("Abort", _FEATURES + "test_abort", requests=("/abort_request",)),
    served(
        "CUDA graphs",
        "gpu/test_graphs.py::test_replays_and_eager_steps_give_the_same_bits",
        Switch("--cuda-graph-backend-decode", only=("full",)),
        Switch("--cuda-graph-max-bs-decode"),
        Switch("--cuda-graph-bs-decode"),
        limit="of decode steps over nvlink, in batches of up to --afd-max-tokens-per-rank rows",
    ),
    served(
        "Speculative decoding",
        "integration/test_speculation.py::test_tokens_are_those_without_speculation",
        Switch("--speculative-algorithm", only=("EAGLE3", "eagle3")),
        Switch("--speculative-draft-model-path", ("--speculative-draft-model",)),
        Switch("--speculative-num-steps"),
        Switch("--speculative-eagle-topk"),
        Switch("--speculative-num-draft-tokens"),
        limit="docs/speculation.md: Qwen3-MoE with a local draft that was made for it, one lane, "
        "overlap scheduler off on CPUs (as in SGLang); not shown on GPUs yet",
    ),
    served("Overlap scheduler", _FEATURES + "test_overlap_scheduler"),
    served(
        "Overlap scheduler off",
        _FEATURES + "test_overlap_scheduler_off",
        Switch("--disable-overlap-schedule"),
    ),
    served("Radix cache", _FEATURES + "test_radix_cache"),
    served("Radix cache off", _FEATURES + "test_radix_cache_off", Switch("--disable-radix-cache")),
    served(
        "Cache of recurrent states: number, strategy, interval",
        "integration/test_state_schedules.py::test_settings_of_the_states_cache",
        Switch("--max-mamba-cache-size"),
        Switch("--mamba-radix-cache-strategy", only=("auto", "no_buffer", "extra_buffer")),
        Switch("--mamba-track-interval"),
        limit="the number is shared out among the attention ranks",
    ),
    served("Chunked prefill", _FEATURES + "test_chunked_prefill", Switch("--chunked-prefill-size")),
    served("Mixed chunk", _FEATURES + "test_mixed_chunk", Switch("--enable-mixed-chunk")),
    served(
        "Structured output (xgrammar)",
        _FEATURES + "test_structured_output",
        Switch("--grammar-backend", only=("xgrammar",)),
        requests=("json_schema", "regex", "ebnf", "response_format"),
    ),
    served(
        "Logprobs",
        _FEATURES + "test_logprobs",
        requests=("return_logprob", "top_logprobs_num", "logprobs"),
    ),
    served("Several answers (n > 1)", _FEATURES + "test_parallel_sampling", requests=("n",)),
    served(
        "Sessions",
        _FEATURES + "test_session",
        requests=("/open_session", "/close_session", "session_params"),
        limit="with several attention ranks, all turns of a session must name the same one "
        "(routed_dp_rank), as in SGLang with attention DP",
    ),
    served(
        "Priority scheduling",
        _FEATURES + "test_priority_scheduling",
        Switch("--enable-priority-scheduling"),
    ),
    served(
        "Load balancing",
        _FEATURES + "test_load_balancing",
        Switch(
            "--load-balance-method", only=("auto", "round_robin", "total_requests", "total_tokens")
        ),
    ),
    served(
        "Requests to one attention rank",
        _FEATURES + "test_routed_dp_rank",
        requests=("routed_dp_rank",),
        limit="a request that names an FFN rank gets a 400",
    ),
    served(
        "Metrics", _ENDPOINTS + "test_metrics", Switch("--enable-metrics"), requests=("/metrics",)
    ),
    served("Health", _ENDPOINTS + "test_health", requests=("/health", "/health_generate")),
    served("Server information", _ENDPOINTS + "test_server_info", requests=("/server_info",)),
    served(
        "Loads",
        _ENDPOINTS + "test_loads",
        requests=("/v1/loads",),
        limit="attention ranks alone: FFN ranks take no requests",
    ),
    served("Cache flush", _ENDPOINTS + "test_flush_cache", requests=("/flush_cache",)),
    served(
        "Pause and continue",
        _ENDPOINTS + "test_pause_and_continue",
        requests=("/pause_generation", "/continue_generation"),
    ),
    served(
        "Core-attention disaggregation (--afd-mode cad)",
        "integration/test_cad.py::test_each_role_holds_its_part",
        limit="docs/cad.md: CPU only, Qwen3-MoE, MiniMax-M2, Qwen3.5 (text); what of this table "
        "goes with it is a list in sglang_afd/features/cad.py, and the rest is refused",
    ),
    served(
        "Redundant and placed experts (--afd-expert-replicas, --afd-expert-placement)",
        "integration/test_expert_replicas.py::test_experts_with_several_slots",
        limit="docs/operating.md: by a file, or by POST /afd/experts while it runs, then "
        "without a draft; never by itself; shown on CPUs",
    ),
    served(
        "SGLang's router in front (sglang-router)",
        "integration/test_router.py::test_router",
        limit="--dp-aware names attention ranks alone; not its prefill-decode mode",
    ),
    served(
        "Weight updates from disk",
        "integration/test_weight_update.py::test_update_from_disk",
        requests=("/update_weights_from_disk",),
        limit="safetensors of the same model on every host's disk, without a draft; all ranks take "
        "them, or none; /health says 503 while they are read; shown on CPUs",
    ),
    served("Profiling", _ENDPOINTS + "test_profile", requests=("/start_profile", "/stop_profile")),
)
