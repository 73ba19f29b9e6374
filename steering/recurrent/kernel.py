"""The kernel of a device that computes linear attention of single tokens, where there is one that agrees with torch."""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable
from typing import Any

import torch

from steering.recurrent.rule import one_token
from steering.recurrent.states import LayerStates
from steering.triton.replaced import alike, drawn

StepFunction = Callable[..., torch.Tensor]
"""The type of `stepped`, without the kernel."""

log = logging.getLogger(__name__)

_known: dict[tuple[Any, ...], bool] = {}


def step_kernel(module: Any) -> StepFunction | None:
    """Return the kernel of a layer's linear attention, or None.

    That is without a GPU or Triton, and where the kernel fails or is wrong, of which the log tells.
    """
    weight = module.conv1d.weight
    if weight.device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    heads = module.num_k_heads, module.num_v_heads, module.head_k_dim, module.head_v_dim
    kind = type(module), weight.device, weight.dtype, weight.shape, heads
    from steering.recurrent import triton_delta  # noqa: PLC0415 -- only torch's builds for GPUs can import it

    kernel = functools.partial(stepped, triton_delta.delta_step)
    if kind not in _known:
        try:
            _known[kind] = is_right(kernel, module)
            reason = "the kernel gives other results"
        except Exception as error:  # triton also needs a C compiler
            _known[kind], reason = False, f"{type(error).__name__}: {error}"
        if not _known[kind]:
            log.warning("linear attention is computed by torch: %s", reason)
    return kernel if _known[kind] else None


def stepped(
    kernel: Callable[..., torch.Tensor],
    module: Any,
    mixed: torch.Tensor,
    gate: torch.Tensor,
    alpha: torch.Tensor,
    beta: torch.Tensor,
    states: LayerStates,
    places: tuple[torch.Tensor, torch.Tensor | None],
) -> torch.Tensor:
    """Run the kernel with the weights of a layer's module; the others are as in `triton_delta.delta_step`."""
    weights = module.conv1d.weight, module.A_log, module.dt_bias, module.norm.weight
    eps = module.norm.variance_epsilon
    return kernel(mixed, gate, alpha, beta, weights, eps, states, places, module.num_k_heads)


@torch.inference_mode()
def is_right(kernel: StepFunction, module: Any) -> bool:
    """Return True where a kernel gives what plain torch gives for two rows, and leaves other states as they are."""
    weight, (heads, k, v) = module.conv1d.weight, (module.num_v_heads, module.head_k_dim, module.head_v_dim)
    sizes = len(weight), heads * v, heads, heads
    mixed, gate, beta, alpha = drawn((2, sum(sizes)), weight).split(sizes, -1)  # parts of one product
    pools = drawn((5, len(weight), weight.shape[2] - 1), weight), drawn((5, heads, k, v), weight.float())
    read, write = torch.tensor([[1, 3], [0, 4]], device=weight.device)
    inputs = torch.cat([pools[0][read], mixed[..., None]], 2)
    output, matrix = one_token(module, inputs, alpha, beta, pools[1][read])
    expected = [pools[0].index_copy(0, write, inputs[:, :, 1:]), pools[1].index_copy(0, write, matrix)]
    expected.append(module.norm(output.flatten(0, -2), gate.reshape(-1, v)).view(2, -1))
    ours = [tensor.clone() for tensor in pools]
    tried = kernel(module, mixed, gate, alpha, beta, ours, (read, None))
    unchanged = all(map(torch.equal, ours, pools))
    ours.append(kernel(module, mixed, gate, alpha, beta, ours, (read, write)))
    return unchanged and torch.equal(tried, ours[2]) and all(map(alike, ours, expected))
