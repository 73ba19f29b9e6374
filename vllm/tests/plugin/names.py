"""The names of vLLM that the plugin touches and that vLLM does not promise, looked up in the source of any version.

Nothing of vLLM is imported, so that a wheel for GPUs can be looked at where it cannot run:
`python vllm/tests/plugin/names.py FOLDER_OF_VLLM` prints what is missing.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

LAYERS = "model_executor/layers/attention"
BACKENDS = "v1/attention/backends"
CPU = f"{BACKENDS}/cpu_attn.py"
IMPL = (
    "num_heads", "num_kv_heads", "head_size", "scale", "alibi_slopes", "sliding_window", "logits_soft_cap", "sinks",
    "kv_cache_dtype", "forward",
)  # fmt: skip
FORWARD = ("layer", "query", "key", "value", "kv_cache", "attn_metadata", "output")
CLASSES: dict[tuple[str, str], tuple[str, ...]] = {
    ("engine/arg_utils.py", "EngineArgs"): (
        "create_engine_config", "worker_cls", "scheduler_cls", "async_scheduling", "structured_outputs_config",
        "additional_config", "mm_device_do_normalize",
    ),
    ("engine/protocol.py", "EngineClient"): ("vllm_config", "renderer", "generate", "abort", "collective_rpc"),
    ("renderers/base.py", "BaseRenderer"): ("render_cmpl_async",),
    ("sampling_params.py", "SamplingParams"): ("extra_args", "skip_reading_prefix_cache", "structured_outputs"),
    ("plugins/endpoint_plugins/interface.py", "EndpointPlugin"): (
        "name", "required_tasks", "attach_router", "init_state",
    ),
    ("v1/worker/cpu_worker.py", "CPUWorker"): ("init_device",),
    ("v1/worker/gpu_worker.py", "Worker"): ("load_model", "model_runner", "sample_tokens", "use_v2_model_runner"),
    ("v1/worker/worker_base.py", "WorkerBase"): ("scheduler_config", "vllm_config"),
    ("v1/worker/gpu_model_runner.py", "GPUModelRunner"): (
        "_model_forward", "_sample", "_bookkeeping_sync", "_get_prompt_logprobs_dict", "input_batch", "requests",
        "query_start_loc", "discard_request_mask", "device", "model", "vllm_config", "kv_cache_config",
    ),
    ("v1/worker/gpu_input_batch.py", "InputBatch"): ("req_ids", "num_reqs", "num_computed_tokens_cpu", "generators"),
    ("v1/worker/gpu_input_batch.py", "CachedRequestState"): ("sampling_params", "output_token_ids"),
    ("v1/core/sched/scheduler.py", "Scheduler"): (
        "update_from_output", "requests", "running", "finish_requests", "kv_cache_manager",
    ),
    ("v1/core/sched/async_scheduler.py", "AsyncScheduler"): ("_update_after_schedule",),
    ("v1/core/kv_cache_manager.py", "KVCacheManager"): ("evict_blocks", "get_block_ids", "block_pool"),
    ("v1/core/block_pool.py", "BlockPool"): ("null_block",),
    ("v1/engine/__init__.py", "EngineCoreOutput"): ("request_id", "new_token_ids", "finish_reason"),
    ("v1/engine/__init__.py", "EngineCoreOutputs"): ("outputs",),
    ("v1/core/sched/output.py", "SchedulerOutput"): ("num_scheduled_tokens",),
    ("v1/outputs.py", "ModelRunnerOutput"): ("req_ids", "req_id_to_index", "sampled_token_ids", "prompt_logprobs_dict"),
    ("v1/outputs.py", "SamplerOutput"): ("sampled_token_ids",),
    ("v1/request.py", "Request"): (
        "num_computed_tokens", "num_tokens", "sampling_params", "is_finished", "request_id", "client_index",
        "get_finished_reason",
    ),
    ("model_executor/models/interfaces_base.py", "VllmModelForTextGeneration"): ("compute_logits",),
    ("v1/kv_cache_interface.py", "KVCacheConfig"): ("kv_cache_groups",),
    ("multimodal/inputs.py", "MultiModalFieldElem"): ("data",),
    ("config/compilation.py", "CompilationConfig"): ("static_forward_context",),
    ("config/cache.py", "CacheConfig"): ("num_gpu_blocks", "block_size", "kv_sharing_fast_prefill"),
    ("config/scheduler.py", "SchedulerConfig"): ("max_num_seqs", "max_num_batched_tokens", "async_scheduling", "watermark"),
    ("config/model.py", "ModelConfig"): (
        "get_total_num_hidden_layers", "is_mm_prefix_lm", "get_hidden_size", "get_head_size", "get_vocab_size",
        "max_model_len", "dtype", "hf_config", "rswa_window",
    ),
    ("config/parallel.py", "ParallelConfig"): ("use_ubatching",),
    (f"{LAYERS}/attention.py", "Attention"): ("impl", "attn_type", "kv_cache", "attn_backend"),
    (CPU, "CPUAttentionMetadata"): ("slot_mapping", "block_table"),
    (CPU, "CPUAttentionBackendImpl"): IMPL,
    ("v1/attention/backend.py", "AttentionBackend"): ("get_builder_cls",),
    ("v1/attention/backend.py", "AttentionImplBase"): ("dcp_world_size", "pcp_world_size"),
    ("v1/attention/backend.py", "CommonAttentionMetadata"): ("block_table_tensor",),
    (f"{BACKENDS}/flash_attn.py", "FlashAttentionMetadata"): ("block_table",),
    (f"{BACKENDS}/flash_attn.py", "FlashAttentionImpl"): IMPL,
    (f"{BACKENDS}/triton_attn.py", "TritonAttentionMetadata"): ("block_table",),
    (f"{BACKENDS}/triton_attn.py", "TritonAttentionImpl"): IMPL,
    (f"{BACKENDS}/flashinfer.py", "FlashInferImpl"): IMPL,
}  # fmt: skip
"""Attributes and methods by the file and class that have them, by itself or from a base in the same file."""
FUNCTIONS: dict[tuple[str, str], tuple[str, ...]] = {
    ("v1/worker/gpu_model_runner.py", "GPUModelRunner._sample"): ("logits", "spec_decode_metadata"),
    ("renderers/base.py", "BaseRenderer.render_cmpl_async"): ("prompts", "skip_mm_cache"),
    ("v1/core/sched/scheduler.py", "Scheduler.update_from_output"): ("scheduler_output", "model_runner_output"),
    (CPU, "CPUAttentionBackendImpl.forward"): FORWARD,
    (f"{BACKENDS}/flash_attn.py", "FlashAttentionImpl.forward"): FORWARD,
    (f"{BACKENDS}/triton_attn.py", "TritonAttentionImpl.forward"): FORWARD,
    (f"{BACKENDS}/flashinfer.py", "FlashInferImpl.forward"): FORWARD,
    (f"{BACKENDS}/flashinfer.py", "FlashInferMetadataBuilder.build"): ("common_prefix_len", "common_attn_metadata"),
    ("_custom_ops.py", "cpu_attn_reshape_and_cache"): (
        "key", "value", "key_cache", "value_cache", "slot_mapping", "isa",
    ),
    ("_custom_ops.py", "cpu_attn_get_scheduler_metadata"): (
        "num_reqs", "num_heads", "num_kv_heads", "head_dim", "seq_lens", "dtype", "query_start_loc", "causal",
        "sliding_window_size", "isa", "enable_kv_split",
    ),
    ("_custom_ops.py", "cpu_attention_with_kv_cache"): (
        "query", "key_cache", "value_cache", "output", "query_start_loc", "seq_lens", "scale", "causal", "alibi_slopes",
        "sliding_window", "block_table", "softcap", "scheduler_metadata", "s_aux",
    ),
    ("model_executor/models/qwen2.py", "Qwen2DecoderLayer.forward"): ("hidden_states", "residual"),
    ("model_executor/models/llama.py", "LlamaDecoderLayer.forward"): ("hidden_states", "residual"),
    ("model_executor/models/gemma3.py", "Gemma3DecoderLayer.forward"): ("hidden_states", "residual"),
}  # fmt: skip
"""Arguments by file and function."""
TEXTS: dict[str, tuple[str, ...]] = {
    "config/__init__.py": ("CUDAGraphMode",),
    "distributed/communication_op.py": ("def tensor_model_parallel_all_reduce",),
    "distributed/parallel_state.py": ("def get_tensor_model_parallel_world_size",),
    "inputs/__init__.py": ("TokensPrompt",),
    "platforms/__init__.py": ("current_platform",),
    "plugins/__init__.py": ("vllm.endpoint_plugins", "vllm.general_plugins"),
    "v1/engine/exceptions.py": ("class EngineDeadError",),
    "envs.py": ("VLLM_CPU_ATTN_SPLIT_KV", "VLLM_USE_V2_MODEL_RUNNER"),
    CPU: ("layer.isa",),
    # The form of the cache: each token's key before its value.
    f"{BACKENDS}/flash_attn.py": ("key_cache, value_cache = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)",),
    f"{BACKENDS}/triton_attn.py": ("key_cache, value_cache = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)",),
    f"{BACKENDS}/flashinfer.py": ("k_cache, v_cache = kv_cache.transpose(1, 2).split(",),
}
"""Words that a file has."""


def missing(vllm: Path) -> list[str]:
    """Return the names that the source of vLLM in a folder lacks."""
    return [*_missing_attributes(vllm), *_missing_arguments(vllm), *_missing_texts(vllm)]


def _missing_attributes(vllm: Path) -> Iterator[str]:
    for (file, name), attributes in CLASSES.items():
        classes = _classes(vllm / file)
        if name not in classes:
            yield f"{file}: {name}"
            continue
        known = _attributes(classes, name)
        yield from (f"{file}: {name}.{attribute}" for attribute in attributes if attribute not in known)


def _missing_arguments(vllm: Path) -> Iterator[str]:
    for (file, path), arguments in FUNCTIONS.items():
        scope, _, name = path.rpartition(".")
        owner = _classes(vllm / file).get(scope) if scope else _tree(vllm / file)
        body = [] if owner is None else owner.body
        functions = [node for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        found = [node for node in functions if node.name == name]
        if not found:
            yield f"{file}: {path}"
            continue
        known = {argument.arg for argument in (*found[-1].args.args, *found[-1].args.kwonlyargs)}
        yield from (f"{file}: {path}({argument})" for argument in arguments if argument not in known)


def _missing_texts(vllm: Path) -> Iterator[str]:
    for file, words in TEXTS.items():
        text = (vllm / file).read_text() if (vllm / file).exists() else ""
        yield from (f"{file}: {word}" for word in words if word not in text)


def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text() if file.exists() else "")


def _classes(file: Path) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in ast.walk(_tree(file)) if isinstance(node, ast.ClassDef)}


def _attributes(classes: dict[str, ast.ClassDef], name: str) -> set[str]:
    """Return the names that a class or its bases in the same file define or assign to `self`."""
    if name not in classes:
        return set()
    node, known = classes[name], set[str]()
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
            known.add(inner.name)
        elif isinstance(inner, ast.AnnAssign | ast.Assign):
            for target in inner.targets if isinstance(inner, ast.Assign) else [inner.target]:
                known |= {part.id for part in ast.walk(target) if isinstance(part, ast.Name)}
                known |= {part.attr for part in ast.walk(target) if isinstance(part, ast.Attribute)}
    for base in node.bases:
        if isinstance(base, ast.Name):
            known |= _attributes(classes, base.id)
    return known


if __name__ == "__main__":
    print("\n".join(missing(Path(sys.argv[1]))) or "nothing is missing")
