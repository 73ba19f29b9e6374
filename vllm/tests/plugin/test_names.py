"""The private names of vLLM that the plugin touches: all are there, and one that is gone is named."""

from __future__ import annotations

import ast
import importlib
import os
from pathlib import Path

import helmsight_vllm
import pytest

import vllm
from plugin.names import CLASSES, FUNCTIONS, TEXTS, missing

VLLM = Path(vllm.__file__).parent
PLUGIN = Path(helmsight_vllm.__file__).parent
OWNERS = {
    "runner", "batch", "impl", "layer", "meta", "model", "config", "cache", "request", "output", "engine",
    "scheduler_output", "model_runner_output",
}  # fmt: skip
"""Variables of the plugin that hold objects of vLLM."""
PUBLIC = {
    "output": {"prompt_logprobs", "num_cached_tokens", "outputs"},  # of RequestOutput
    "request": {"app", "body"},  # of Starlette
    "layer": {"register_buffer", "__class__", "__name__"},  # of torch, and of Python
    "impl": {"__class__"},
    "model": {"get_submodule", "named_modules"},
    "cache": {"dim", "dtype", "shape", "view"},
    "config": {
        "model_config",
        "scheduler_config",
        "cache_config",
        "compilation_config",
        "device_config",
        "parallel_config",
        "speculative_config",
    },
}
"""Names of theirs that vLLM, torch or Starlette document."""


def test_every_name_is_in_this_version() -> None:
    assert not missing(VLLM)


def test_every_name_is_in_a_wheel_that_cannot_run_here() -> None:
    """`HELMSIGHT_VLLM_WHEEL` is the folder of its package, as unpacked."""
    folder = os.environ.get("HELMSIGHT_VLLM_WHEEL")
    if folder is None:
        pytest.skip("no wheel was unpacked")
    assert not missing(Path(folder))


@pytest.mark.parametrize(
    ("file", "old", "new", "name"),
    [
        ("v1/worker/gpu_model_runner.py", "_bookkeeping_sync", "_gone", "GPUModelRunner._bookkeeping_sync"),
        ("v1/worker/gpu_model_runner.py", "discard_request_mask", "gone", "GPUModelRunner.discard_request_mask"),
        ("_custom_ops.py", "value_cache", "gone", "cpu_attention_with_kv_cache(value_cache)"),
        ("v1/request.py", "class Request:", "class Gone:", "Request"),
        ("envs.py", "VLLM_USE_V2_MODEL_RUNNER", "GONE", "VLLM_USE_V2_MODEL_RUNNER"),
    ],
)
def test_a_name_that_is_gone_is_named(tmp_path: Path, file: str, old: str, new: str, name: str) -> None:
    for path in {*(path for path, _ in (*CLASSES, *FUNCTIONS)), *TEXTS}:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        text = (VLLM / path).read_text()
        (tmp_path / path).write_text(text.replace(old, new) if path == file else text)
    assert any(line.endswith(name) for line in missing(tmp_path)), missing(tmp_path)


def test_every_import_of_the_plugin_exists() -> None:
    for path in PLUGIN.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "vllm":
                if node.module == "vllm.v1.worker.gpu_worker":
                    continue  # of GPUs
                module = importlib.import_module(node.module)
                assert all(hasattr(module, alias.name) for alias in node.names), f"{path.name}: {node.module}"


def test_the_list_has_all_that_the_plugin_touches() -> None:
    listed = {name for names in CLASSES.values() for name in names} | {"isa"}
    unlisted = set()
    for path in PLUGIN.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
                owner = node.value.id if isinstance(node.value, ast.Name) else node.value.attr.strip("_")
                if owner in OWNERS and node.attr not in listed | PUBLIC.get(owner, set()):
                    unlisted.add(f"{path.name}: {owner}.{node.attr}")
    assert not unlisted
