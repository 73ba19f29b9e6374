"""Loading of a checkpoint as a model that the engine can run, on one device or on several."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoConfig
from transformers.distributed.configuration_utils import DistributedConfig

from steering.decoder import attention, int8
from steering.decoder.ranks import ALONE, Ranks
from steering.errors import UnsupportedModel
from steering.model import calibration
from steering.model.chat.template_file import read_template, set_template
from steering.model.checkpoint.folder import embedded, located
from steering.model.checkpoint.weights import build_empty, is_quantized, read_weights, unreadable
from steering.model.mllm import MLLM, Quantization, Source
from steering.model.processing.processor import load_processor, missing_package
from steering.recurrent import layers

DTYPES = ("float32", "bfloat16", "float16")
"""The dtypes that weights may be loaded as, besides "auto"."""

QUANTIZATIONS = get_args(Quantization)

DeviceMap = str | Mapping[str, str | int | torch.device]
"""The placement of a model: "auto", or a device for each of its modules by name."""


def load(
    path: str | Path | None = None,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    device_map: DeviceMap | None = None,
    tensor_parallel: int = 1,
    quantization: Quantization | None = None,
    local_files_only: bool = True,
    name: str | None = None,
    unread: str | None = None,
    chat_template: str | Path | None = None,
    calibrations: str | Path | None = None,
) -> MLLM:
    """Load an image-text-to-text checkpoint (folder or hub name) and patch its language model.

    Without `path` it is the small model that ships with Helmsight.

    `device` "auto" is the first GPU, else the CPU; `dtype` "auto" is the checkpoint's own on a GPU and float32 on a CPU,
    whose half-precision kernels are slow. A `device_map` in place of a device spreads a model that is too large for one over
    several: "auto" over all GPUs, or a device for each module by name, as accelerate reads it. With `tensor_parallel` N this
    process, which torchrun has started as one of N, loads its share of every layer; the engines of the others follow that of
    the first (see `Engine.follow`). With `quantization` "int8" the language model's layers compute in 8-bit integers from
    its engine's self-check on, which compares them with the original ones; a checkpoint's own quantized weights are read as
    the numbers that they stand for. `unread`, the model's fingerprint or "", skips reading its weights, for callers that
    only need its structure: they are uninitialised memory, or none on the device "meta", which is enough to prepare
    requests. `chat_template` is a file with a Jinja template in place of its own. `calibrations` is the folder with models'
    calibrations, the user's by default. No code from the checkpoint is run.

    Raises UnsupportedModel when the model's structure cannot be served, weights are missing or quantized otherwise, there is
    no such device or dtype, or it has no chat template; OSError when the files are missing.
    """
    path = embedded() if path is None else located(path, local_files_only)
    _refuse_arguments(dtype, device, device_map, tensor_parallel, quantization)
    ranks = ALONE if tensor_parallel == 1 else joined(tensor_parallel)
    template = None if chat_template is None else read_template(chat_template)
    device = _found(device)
    if quantization is not None and device.type == "cpu" and not int8.is_exact(device):
        raise UnsupportedModel("int8 needs a CPU with VNNI: on this one, sums of integers overflow.")
    if dtype == "auto" and device.type == "cpu":
        dtype = torch.float32
    torch.backends.cudnn.allow_tf32 = False  # else a GPU rounds the inputs of float32 convolutions to 10 bits
    attention.register()
    options: dict[str, Any] = {"local_files_only": local_files_only, "trust_remote_code": False}
    config = AutoConfig.from_pretrained(path, **options)
    refuse_structure(config)
    if tensor_parallel > 1:
        refuse_split(config, tensor_parallel)
        options["distributed_config"] = DistributedConfig(tp_size=tensor_parallel)
    processor = load_processor(path, local_files_only=local_files_only)
    if not set_template(processor, config.model_type, template) and unread is None:
        raise UnsupportedModel(
            f"{path} has no chat template: name a file that holds one, by --chat-template or as 'chat_template'."
        )
    options |= {"dtype": dtype, "attn_implementation": {"text_config": attention.NAME}}
    try:
        if unread is None:
            model = read_weights(path, config, device_map=device_map, **options)
        else:
            model = build_empty(path, config, device, **options)
    except ImportError as error:
        raise UnsupportedModel(missing_package(f"The model of {path}", str(error))) from error
    model = model.eval().requires_grad_(False)
    if tensor_parallel > 1:
        refuse_sinks(model, tensor_parallel)
    if device_map is not None:
        refuse_offloaded(model)
    elif tensor_parallel == 1:
        model = model.to(device)
    folder = Path(path) if Path(path).is_dir() else None
    results = Path(calibration.FOLDER if calibrations is None else calibrations).expanduser()
    try:
        mllm = MLLM(model, processor, name, folder, ranks, quantization, unread, results)
    except (AttributeError, TypeError) as error:
        raise UnsupportedModel(
            f"{config.model_type} cannot be served: it has no decoder that reads image tokens: {error}."
        ) from error
    if mllm.vocab_size > mllm.token_inputs.vocab_size:  # such a token would end the process on a GPU
        raise UnsupportedModel(
            f"{config.model_type} cannot be served: its output layer knows {mllm.vocab_size} tokens, its embeddings "
            f"{mllm.token_inputs.vocab_size}."
        )
    if device_map is None and tensor_parallel == 1:
        place = str(path if folder is None else folder.resolve())
        mllm.source = Source(place, str(dtype).removeprefix("torch."), quantization)
        if device.type == "cpu" and quantization is None:
            _store_weights_by_column(mllm.decoder)
    return mllm


def _refuse_arguments(
    dtype: str | torch.dtype,
    device: str | torch.device,
    device_map: DeviceMap | None,
    tensor_parallel: int,
    quantization: str | None,
) -> None:
    """Raise UnsupportedModel for arguments of `load` that are unknown or exclude each other."""
    if isinstance(dtype, str) and dtype != "auto" and dtype not in DTYPES:
        raise UnsupportedModel(f"'dtype' must be one of auto, {', '.join(DTYPES)}; got {dtype!r}.")
    if quantization not in (None, *QUANTIZATIONS):
        raise UnsupportedModel(f"'quantization' must be one of {', '.join(QUANTIZATIONS)}; got {quantization!r}.")
    if device_map is not None and tensor_parallel > 1:
        raise UnsupportedModel("'device_map' and 'tensor_parallel' are mutually exclusive.")
    laid = "device_map" if device_map is not None else "tensor_parallel" if tensor_parallel > 1 else None
    if laid is None:
        return
    if device != "auto":
        raise UnsupportedModel(f"{laid!r} already places the model; leave 'device' out, which is {str(device)!r}.")
    if find_spec("accelerate") is None:
        raise UnsupportedModel(f"{laid!r} needs accelerate: pip install 'helmsight[parallel]'.")
    if quantization is not None:
        raise UnsupportedModel(f"{laid!r} and 'quantization' are mutually exclusive.")


def _found(device: str | torch.device) -> torch.device:
    """Return a device that exists: for "auto" the first GPU, else the CPU. Raises UnsupportedModel for others."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UnsupportedModel(f"There is no device {device}: torch sees {torch.cuda.device_count()} of its kind.")
    return device


def joined(size: int) -> Ranks:
    """Return this process's rank among the `size` that torchrun has started; the first call connects them.

    Raises UnsupportedModel where it was not started so.
    """
    if not dist.is_initialized():
        if "RANK" not in os.environ or os.environ.get("WORLD_SIZE") != str(size):
            raise UnsupportedModel(
                f"'tensor_parallel' {size} needs {size} processes: torchrun --standalone --nproc-per-node {size}; torchrun "
                f"has started {os.environ.get('WORLD_SIZE', 'none')}."
            )
        if (
            os.environ.get("LOCAL_WORLD_SIZE") == str(size) and sys.platform == "linux"
        ):  # the processes communicate within the machine
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        store, rank, _ = next(rendezvous("env://"))
        # torchrun keeps the store over a restart, with the addresses of the old processes.
        fresh = PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=fresh, rank=rank, world_size=size)
    return Ranks(dist.get_rank(), dist.get_world_size())


def refuse_split(config: Any, size: int) -> None:
    """Raise UnsupportedModel for a model whose heads, neurons or weights cannot be divided among `size` processes."""
    text = config.get_text_config()
    if is_quantized(config):
        raise UnsupportedModel(
            f"{config.model_type} cannot be served by {size} processes together: its quantized weights cannot be divided."
        )
    if getattr(text, "num_experts", 0) or getattr(text, "num_local_experts", 0):
        raise UnsupportedModel(
            f"{config.model_type} cannot be served by {size} processes together: its experts cannot be divided."
        )
    heads = text.num_attention_heads
    for count, parts in (
        (heads, "attention heads"),
        (getattr(text, "num_key_value_heads", None) or heads, "key-value heads"),
        (getattr(text, "intermediate_size", 0), "FFN neurons"),
    ):
        if count % size:
            raise UnsupportedModel(
                f"{config.model_type} cannot be served by {size} processes together: its {count} {parts} cannot be divided."
            )
    if not any(name.startswith("layers.") for name in getattr(text, "base_model_tp_plan", None) or ()):
        raise UnsupportedModel(
            f"{config.model_type} cannot be served by {size} processes together: transformers does not divide its layers."
        )


def refuse_offloaded(model: Any) -> None:
    """Raise UnsupportedModel where parts of a model were offloaded: every step would copy them to the devices again."""
    places: dict[str, Any] = getattr(model, "hf_device_map", {})
    outside = [name or "all of it" for name, place in places.items() if str(place) in ("cpu", "disk")]
    if outside and len({str(place) for place in places.values()}) > 1:
        raise UnsupportedModel(
            f"The model does not fit the devices: {outside[0]} and {len(outside) - 1} more of {len(places)} parts do not "
            "fit. Use more devices, or a smaller dtype."
        )


def refuse_sinks(model: nn.Module, size: int) -> None:
    """Raise UnsupportedModel for a model whose heads have attention sinks, of which each process would need its heads'."""
    if any(isinstance(getattr(module, "sinks", None), nn.Parameter) for module in model.modules()):
        raise UnsupportedModel(
            f"{model.config.model_type} cannot be served by {size} processes together: its heads' attention sinks cannot "  # type: ignore[union-attr]
            "be divided."
        )


def _store_weights_by_column(decoder: nn.Module) -> None:
    """Store linear weights in the order that suits products with few rows, as in decode.

    Decode is a tenth faster for 16 rows on a CPU. The values, and the module's results, stay the same.
    """
    for module in decoder.modules():
        if isinstance(module, nn.Linear):
            module.weight.data = module.weight.data.t().contiguous().t()


def refuse_structure(config: Any) -> None:
    """Raise UnsupportedModel, by the config alone, for models without images or unfit for the slot KV pool.

    Weights that transformers cannot turn back into numbers are refused, too; the self-check catches the rest.
    """
    text = config.get_text_config()
    held = {
        "full_attention",
        "sliding_attention",
        *(kind for kind, entry in layers.KINDS.items() if hasattr(text, entry)),
    }
    kinds = sorted(set(getattr(text, "layer_types", None) or ()) - held)
    reason = None
    if type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        reason = "it takes no images, as far as transformers knows"
    elif kinds:
        reason = (
            f"it has layers of type {', '.join(kinds)}; only softmax attention, the gated delta rule and short convolutions "
            "can be held"
        )
    elif getattr(text, "cross_attention_layers", None):
        reason = "its language model reads images by cross-attention, which leaves no image tokens to look at"
    elif getattr(text, "altup_num_inputs", 1) > 1 or getattr(text, "hc_count", 1) > 1:
        reason = "its layers hand on several residual streams"
    elif getattr(config, "is_encoder_decoder", False):
        reason = "it is an encoder-decoder model"
    elif "num_attention_heads" in (getattr(text, "per_layer_attributes", None) or ()):
        reason = "its layers have different numbers of attention heads"
    elif getattr(config, "image_token_id", None) is None:
        reason = "its config names no token that stands for the features of images"
    elif unread := unreadable(config):
        reason = unread
    if reason:
        raise UnsupportedModel(f"{config.model_type} cannot be served: {reason}.")
