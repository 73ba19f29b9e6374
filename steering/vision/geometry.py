"""Tensors that follow from numbers of tokens and sizes of pictures alone, computed on the CPU.

On a GPU each read of such a number is a sync, and a vision encoder has several in each of its layers.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers.exporters.utils import precompute_export_inputs

from steering.devices import to_device
from steering.vision import attention

GRID = "image_grid_thw"
"""The processors' key for the number of patches of each picture, (pictures, 3)."""
LENGTHS = ("cu_seqlens", "cu_window_seqlens")
"""The ends of a vision encoder's packed pictures and windows, from which its layers read their lengths."""
POSITIONS = "image_position_ids"
"""Rows and columns of patches, (patches, 2)."""
KEPT = 64
"""The number of grids whose tensors are cached."""


class Geometry:
    """Computes these tensors for the prompts of one model; thread-safe.

    wrapper: the part of the model that takes pictures.
    """

    def __init__(self, wrapper: Any):
        self._wrapper = wrapper
        self._arguments_of = functools.lru_cache(maxsize=KEPT)(self._encoder_arguments)
        parameters = (
            inspect.signature(wrapper.get_rope_index).parameters.values() if hasattr(wrapper, "get_rope_index") else ()
        )
        self._parameters = [
            parameter for parameter in parameters if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        ]

    def rope_positions(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """Return the rotary positions of a prompt with pictures, (axes, 1, n) on the CPU.

        The model must derive them from the processor's tensors, which are on the CPU. None where it derives them from
        others, or computes them itself.
        """
        if GRID not in inputs or "mm_token_type_ids" not in inputs or not self._parameters:
            return None
        if any(
            parameter.default is inspect.Parameter.empty and parameter.name not in inputs
            for parameter in self._parameters
        ):
            return None
        arguments = {
            parameter.name: inputs[parameter.name] for parameter in self._parameters if parameter.name in inputs
        }
        positions: torch.Tensor = self._wrapper.get_rope_index(**arguments)[0]
        return positions

    @contextmanager
    def on_the_host(self, pictures: Mapping[str, torch.Tensor], device: torch.device) -> Iterator[dict[str, Any]]:
        """Yield further arguments of `get_image_features`, computed on the CPU from the pictures' grid.

        The vision encoder would otherwise compute them on the GPU. Within the block its layers read lengths on the CPU, and
        it computes with a copy of the grid on the GPU, while the wrapper may read its own on the CPU. There are none for
        encoders that pack no pictures.
        """
        tower = attention.packed_tower(self._wrapper)
        if GRID not in pictures or tower is None or tower.config._attn_implementation not in (attention.NAME, "eager"):
            yield {}  # other attentions compute with the lengths on the device
            return
        arguments, lengths, grid = self._arguments_of(tuple(map(tuple, pictures[GRID].tolist())), device)

        def moved(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            return args, kwargs | ({"grid_thw": grid} if "grid_thw" in kwargs else {})

        def swap(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            return args, {name: lengths.get(id(value), value) for name, value in kwargs.items()}

        with ExitStack() as stack:
            stack.enter_context(tower.register_forward_pre_hook(moved, with_kwargs=True))
            for block in tower.blocks:
                stack.enter_context(block.register_forward_pre_hook(swap, with_kwargs=True))
            yield arguments

    def alike(self, pictures: Mapping[str, torch.Tensor], device: torch.device) -> list[torch.Tensor] | None:
        """Return the arguments of a `whole_tower` for pictures of one size: pixels and positions.

        Both are (pictures, tokens, patches of a token, ...). None for pictures of several sizes, and where there is no such
        encoder.
        """
        tower = self.whole_tower(device)
        if GRID not in pictures or tower is None:
            return None
        grids = tuple(map(tuple, pictures[GRID].tolist()))
        frames, height, width = grids[0]
        if len({*grids}) > 1 or frames > 1:
            return None
        positions = self._arguments_of(grids, device)[0][POSITIONS]
        assert isinstance(positions, torch.Tensor)
        pixels, merged = to_device(pictures["pixel_values"].to(tower.dtype), device), tower.spatial_merge_size**2
        return [tensor.unflatten(0, (len(grids), height * width // merged, merged)) for tensor in (pixels, positions)]

    def whole_tower(self, device: torch.device) -> Any:
        """Return the vision encoder if it attends to whole pictures and takes only pixels and positions; else None."""
        tower = attention.packed_tower(self._wrapper)
        merged = getattr(tower, "spatial_merge_size", None)
        if merged is None or tower.config._attn_implementation != attention.NAME:
            return None
        arguments, *_ = self._arguments_of(((1, merged, merged),), device)
        tensors = {name for name, tensor in arguments.items() if isinstance(tensor, torch.Tensor)}
        return tower if tensors == {f"image_{LENGTHS[0]}", POSITIONS} else None

    def _encoder_arguments(
        self, grid: tuple[tuple[int, ...], ...], device: torch.device
    ) -> tuple[dict[str, torch.Tensor | int], dict[int, torch.Tensor], torch.Tensor]:
        """Return an encoder's arguments for a grid on a device, the lengths among them on the CPU, by id, and the grid.

        The grid is on the device. The result is cached, because pictures of one size are frequent.
        """
        with torch.inference_mode(False), torch.no_grad():  # cached tensors must work in every mode
            inputs: dict[str, Any] = {"grid_thw": torch.tensor(grid)}
            precompute_export_inputs(self._wrapper.visual, inputs)
            on_device = to_device(inputs.pop("grid_thw"), device)
            tensors = {
                name: to_device(tensor, device) for name, tensor in inputs.items() if isinstance(tensor, torch.Tensor)
            }
            numbers = {name: number for name, number in inputs.items() if isinstance(number, int)}
            arguments: dict[str, torch.Tensor | int] = {
                f"image_{name}": value for name, value in (tensors | numbers).items()
            }
            return arguments, {id(tensors[name]): inputs[name] for name in LENGTHS if name in tensors}, on_device
