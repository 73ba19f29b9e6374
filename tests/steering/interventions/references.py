"""Plain transformers with one thing changed by hand: states behind layers, attention scores. Nothing of the engine."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, LogitsProcessorList
from transformers.masking_utils import eager_mask

import steering
from tests.steering.plain import Force, Messages, Plain

STEPS = 4
SAMPLING = steering.Sampling(max_tokens=STEPS, logprobs=20, ignore_eos=True)
Change = Callable[[int, torch.Tensor, int], torch.Tensor]
"""Gives, of a layer's number and its states (1, n, d) or scores (heads, n, columns), what they are to be. The last number is
that of the first token in a row, or query, counted from the prompt's first."""


@contextmanager
def states_changed(plain: Plain, change: Change) -> Iterator[None]:
    """Within, what each layer hands on is changed, in one answer."""

    def hook(layer: int) -> Callable[..., torch.Tensor]:
        position = 0

        def after(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
            nonlocal position
            start, position = position, position + output.shape[1]
            return change(layer, output, start)

        return after

    with ExitStack() as stack:
        for number, layer in enumerate(plain.layers):
            stack.enter_context(layer.register_forward_hook(hook(number)))
        yield


@contextmanager
def scores_changed(
    plain: Plain, change: Change, weigh: Callable[[int, torch.Tensor], torch.Tensor] = lambda layer, weights: weights
) -> Iterator[None]:
    """Within, scores before the mask and the softmax are changed, in eager attention, in one answer.

    weigh: what the weights (heads, n, columns) behind the softmax are to be.
    """
    positions = [0] * len(plain.layers)

    def attend(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scaling = kwargs.get("scaling") or query.shape[-1] ** -0.5
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = (query @ key.transpose(-1, -2) * scaling).float()
        if kwargs.get("softcap") is not None:
            scores = torch.tanh(scores / kwargs["softcap"]) * kwargs["softcap"]
        start = positions[module.layer_idx]
        positions[module.layer_idx] += scores.shape[2]
        scores = change(module.layer_idx, scores[0], start)[None]
        if mask is not None:
            scores = scores + mask[:, :, :, : key.shape[2]]
        if (sinks := kwargs.get("s_aux")) is not None:  # a column without a value
            scores = torch.cat([scores, sinks.float()[:, None, None].expand(*scores.shape[:3], 1)], -1)
        weights = weigh(module.layer_idx, scores.softmax(-1)[0, ..., : key.shape[2]])[None]
        return (weights.to(value.dtype) @ value).transpose(1, 2).contiguous(), weights

    AttentionInterface.register("changed", attend)
    AttentionMaskInterface.register("changed", eager_mask)
    plain.model.set_attn_implementation({"text_config": "changed"})
    try:
        yield
    finally:
        plain.model.set_attn_implementation({"text_config": "eager"})


@torch.inference_mode()
def states_along(plain: Plain, messages: Messages, tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the plain model's logits before each token of an answer, and the states from which they are computed.

    logits: (tokens, vocabulary). states: (tokens, layers + 1, d), the embeddings first, the last one normalised.
    """
    inputs = plain.inputs(messages)
    force = LogitsProcessorList([Force(inputs["input_ids"].shape[1], tokens)])
    out = plain.model.generate(
        **inputs,
        max_new_tokens=len(tokens),
        do_sample=False,
        logits_processor=force,
        output_logits=True,
        output_hidden_states=True,
        return_dict_in_generate=True,
    )
    states = torch.stack([torch.stack([layer[0, -1] for layer in step]) for step in out.hidden_states])
    return torch.cat(out.logits).float(), states


def logprobs_along(plain: Plain, messages: Messages, tokens: Sequence[int]) -> torch.Tensor:
    """(tokens, vocabulary): the plain model's log-probabilities before each of an answer's tokens."""
    return states_along(plain, messages, tokens)[0].log_softmax(-1)


def assert_chosen_by(choice: steering.Choice, logprobs: torch.Tensor, atol: float = 1e-4) -> None:
    """Check that the choice took the likeliest tokens by log-probabilities (steps, vocabulary), and reports them.

    Tokens within the rounding of numbers are as good.
    """
    assert choice.logprobs is not None
    assert len(choice.logprobs) == len(logprobs)
    for row, step in zip(logprobs, choice.logprobs, strict=True):
        assert float(row[step.token_id]) >= float(row.max()) - atol
        ids = [step.token_id, *(alternative.token_id for alternative in step.top)]
        reported = torch.tensor([step.logprob, *(alternative.logprob for alternative in step.top)])
        torch.testing.assert_close(reported, row[ids], rtol=2e-5, atol=atol)


def assert_as_near_as_plain(
    choice: steering.Choice, exact: torch.Tensor, rounded: torch.Tensor, factor: float = 2.0
) -> None:
    """Check log-probabilities in half precision: at most twice as far from float32 as plain transformers' are.

    exact, rounded: (steps, vocabulary), of plain transformers in float32 and in that precision.
    """
    errors, plain_errors = [], []
    for row, plain, step in zip(exact, rounded, choice.logprobs or (), strict=True):
        ids = [alternative.token_id for alternative in step.top]
        errors.append(torch.tensor([alternative.logprob for alternative in step.top]) - row[ids])
        plain_errors.append(plain[ids] - row[ids])
    assert 0 < float(torch.cat(errors).norm()) <= factor * float(torch.cat(plain_errors).norm())


def rounding(folder: Path, dtype: str) -> tuple[steering.Engine, Plain]:
    """Return an engine and plain transformers in half precision."""
    plain = Plain(folder)
    plain.model.to(getattr(torch, dtype))
    return steering.Engine(steering.load(folder, dtype=dtype, device="cpu"), slots=2, self_check=False), plain


def only(engine: steering.Engine, messages: Messages, *interventions: Any, **more: Any) -> steering.Choice:
    """Return the only answer to a request that runs alone."""
    return engine.generate([steering.Request(messages, SAMPLING, interventions, **more)])[0].choices[0]


def occluded(
    inputs: dict[str, torch.Tensor],
    grids: list[tuple[int, int] | None],
    chosen: list[list[int]],
    fill: Sequence[float] | None = None,
) -> dict[str, torch.Tensor]:
    """Return the processor's tensors with patches filled by hand, with a colour or each picture's mean."""
    pixels = inputs["pixel_values"].clone()
    if "image_grid_thw" in inputs:
        start = 0
        for grid, patches in zip(grids, chosen, strict=True):
            assert grid is not None
            rows, columns = grid
            merged = int(inputs["image_grid_thw"][0].prod()) // (rows * columns) if len(grids) == 1 else 4
            end = start + rows * columns * merged
            picture = pixels[start:end].reshape(end - start, 3, -1)
            mean = picture.mean((0, 2)) if fill is None else torch.tensor(fill)
            for patch in patches:
                for row in range(start + patch * merged, start + (patch + 1) * merged):
                    pixels[row] = mean.repeat_interleave(pixels.shape[1] // 3)
            start = end
    else:
        sizes = inputs["image_sizes"].tolist() if "image_sizes" in inputs else [pixels.shape[2:]] * len(pixels)
        for padded, (h, w), grid, patches in zip(pixels, sizes, grids, chosen, strict=True):
            assert grid is not None
            rows, columns = grid
            picture = padded[:, :h, :w]
            height, width = picture.shape[1] // rows, picture.shape[2] // columns
            mean = picture.mean((1, 2)) if fill is None else torch.tensor(fill)
            for patch in patches:
                y, x = patch // columns * height, patch % columns * width
                for channel in range(3):
                    picture[channel, y : y + height, x : x + width] = mean[channel]
    return inputs | {"pixel_values": pixels}


@contextmanager
def features_hidden(decoder: torch.nn.Module, columns: list[torch.Tensor], chosen: list[list[int]]) -> Iterator[None]:
    """Let a plain decoder receive the mean of each image's features in place of the chosen ones.

    columns: of each image's tokens. They enter in the embeddings, or, one row for each of these tokens, between layers.
    """
    ends = list(itertools.accumulate(map(len, columns)))
    rows = [torch.arange(end - len(part), end) for end, part in zip(ends, columns, strict=True)]

    def hidden(values: torch.Tensor, places: list[torch.Tensor]) -> torch.Tensor:
        values = values.clone()
        for place, patches in zip(places, chosen, strict=True):
            values[place[patches]] = values[place].mean(0)
        return values

    def hide(module: torch.nn.Module, args: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        changed = {"inputs_embeds": hidden(given["inputs_embeds"][0], columns)[None]}
        if further := given.get("deepstack_features"):
            changed["deepstack_features"] = {layer: hidden(value, rows) for layer, value in further.items()}
        return args, given | changed

    handle = decoder.register_forward_pre_hook(hide, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
