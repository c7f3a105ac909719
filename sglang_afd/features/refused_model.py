"""Rows of features that AFD refuses: models, their weights and the cache."""

from __future__ import annotations

from sglang_afd.features.row import LEAVE_OUT, NOT_SHOWN, Feature, Switch, flags, refused

REFUSED: tuple[Feature, ...] = (
    refused(
        "LoRA, several LoRA adapters",
        "adapters are applied by the ranks that hold a layer, and FFN ranks load none",
        "merge the adapter into the checkpoint",
        *flags("--enable-lora", "--lora-paths", "--lora-target-modules", "--max-lora-rank"),
        requests=("/load_lora_adapter", "/load_lora_adapter_from_tensors", "lora_path"),
    ),
    refused(
        "Multimodal input",
        "of a multimodal model the language model alone is served",
        LEAVE_OUT,
        *flags(
            "--enable-multimodal",
            "--encoder-only",
            "--language-only",
            "--language-model-only",
            "--encoder-urls",
            "--encoder-register-urls",
            "--enable-mm-global-cache",
            "--enable-prefix-mm-cache",
            "--enable-broadcast-mm-inputs-process",
        ),
        Switch("--mm-enable-dp-encoder"),
        requests=("image_data", "video_data", "audio_data"),
    ),
    refused(
        "Embedding and reward models, multi-item scoring",
        "FFN ranks answer a generating model's step only",
        "serve them without --afd-* flags",
        *flags("--is-embedding", "--prefill-only-disable-kv-cache", "--enable-mis"),
        requests=("/encode", "/classify", "/v1/embeddings"),
    ),
    refused(
        "Diffusion language models",
        "no such model family is served",
        "serve them without --afd-* flags",
        Switch("--dllm-algorithm"),
    ),
    refused(
        "Other implementations of the model",
        "AFD replaces the experts of SGLang's own model classes",
        "use --model-impl auto",
        Switch("--model-impl", off=("auto", "sglang")),
        Switch("--model-config-parser", off=("auto", "hf")),
    ),
    refused(
        "Checkpoint loader options",
        "each rank reads its own tensors through AFD's loader, which has none of these",
        LEAVE_OUT,
        *flags(
            "--weight-loader-disable-mmap",
            "--weight-loader-prefetch-checkpoints",
            "--weight-loader-drop-cache-after-load",
            "--delete-ckpt-after-loading",
            "--custom-weight-loader",
            "--modelexpress-config",
            "--remote-instance-weight-loader-seed-instance-ip",
            "--remote-instance-weight-loader-start-seed-via-transfer-engine",
        ),
        Switch("--startup-weight-load-mode", off=("serial",)),
        Switch("--weight-cache-mode", off=("off",)),
    ),
    refused(
        "Quantisation while loading (ModelOpt, FlashRL)",
        "FFN ranks load experts as the checkpoint has them",
        "quantise the checkpoint beforehand, to FP8 with 128x128 blocks",
        *flags(
            "--modelopt-quant",
            "--modelopt-checkpoint-restore-path",
            "--modelopt-checkpoint-save-path",
            "--modelopt-export-path",
            "--quantize-and-serve",
            "--rl-quant-profile",
        ),
    ),
    refused(
        "Weight updates from tensors, another process or over IPC",
        f"{NOT_SHOWN}: every rank would be sent the whole model, and FFN ranks take the tensors of "
        "their own experts alone, all at once",
        "write the weights to disk and call /update_weights_from_disk",
        Switch("--checkpoint-engine-wait-weights-before-ready"),
        requests=(
            "/update_weights_from_tensor",
            "/update_weights_from_distributed",
            "/update_weights_from_ipc",
            "/init_weights_update_group",
            "/destroy_weights_update_group",
            "/begin_weight_update",
            "/end_weight_update",
            "/init_weights_send_group_for_remote_instance",
            "/send_weights_to_remote_instance",
        ),
    ),
    refused(
        "Reading or checking weights",
        "FFN ranks hold their experts under other names than the checkpoint's model",
        "read the checkpoint's files",
        requests=("/get_weights_by_name", "/weights_checker"),
    ),
    refused(
        "Hierarchical cache (HiCache, LMCache, FlexKV, external stores)",
        f"{NOT_SHOWN}: every rank would build a host pool, and FFN ranks have no KV cache to keep",
        "use the radix cache alone",
        Switch("--enable-hierarchical-cache", ("--enable-hicache",)),
        *flags(
            "--hicache-storage-backend",
            "--enable-lmcache",
            "--enable-flexkv",
            "--enable-unified-cache-external-linker",
            "--radix-cache-backend",
        ),
    ),
    refused(
        "Unified memory pool, sparse host cache",
        f"{NOT_SHOWN}: they change the KV pools that AFD sizes over the attention ranks",
        LEAVE_OUT,
        *flags("--enable-unified-memory", "--enable-page-major-kv-layout", "--enable-hisparse"),
    ),
    refused(
        "Streaming sessions, session radix cache",
        NOT_SHOWN,
        "use plain sessions (/open_session)",
        *flags("--enable-streaming-session", "--enable-session-radix-cache"),
    ),
    refused(
        "Quantised KV cache",
        NOT_SHOWN,
        "use --kv-cache-dtype auto or bfloat16",
        Switch("--kv-cache-dtype", off=("auto", "bf16", "bfloat16")),
        Switch("--quantization-param-path"),
    ),
    refused(
        "Memory saver",
        "releasing and restoring memory covers the model that SGLang knows, not the experts on "
        "FFN ranks",
        LEAVE_OUT,
        *flags(
            "--enable-memory-saver",
            "--enable-weights-cpu-backup",
            "--enable-draft-weights-cpu-backup",
        ),
        requests=("/release_memory_occupation", "/resume_memory_occupation"),
    ),
    refused(
        "Weight offloading, experts in host memory",
        "attention ranks hold no experts to offload, and FFN ranks' experts stay on their device",
        "add FFN ranks instead",
        Switch("--cpu-offload-gb", off=("0",)),
        Switch("--offload-group-size", off=("-1",)),
        *flags("--kt-weight-path", "--enable-paged-experts"),
    ),
    refused(
        "Other settings of linear attention and its cache",
        NOT_SHOWN,
        "leave it out: SGLang's own defaults are served, the radix cache with them",
    ),
    refused(
        "Settings of other model families, quantisations and platforms",
        "no model that AFD serves reads them",
        LEAVE_OUT,
    ),
)
