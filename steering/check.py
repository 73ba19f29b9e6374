"""The self-check at load: the engine against the plain model, so that a wrong answer is a refusal and not a surprise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from PIL import Image
from torch import nn

from steering.attention import NAME
from steering.errors import RequestError, UnsupportedModel
from steering.images import ImageCache
from steering.layout import Prompt, build_prompt
from steering.mllm import MLLM
from steering.request import Sampling
from steering.runner import Runner
from steering.sequence import Sequence
from steering.text import TextStream

STEPS = 4
TOLERANCE = {torch.float32: 1e-3}
"""Largest difference of logits relative to the largest logit; half precision rounds more."""
HALF_TOLERANCE = 5e-2


@torch.inference_mode()
def self_check(mllm: MLLM, compiled: bool = False) -> None:
    """Compare prefill and several decoding steps of two ragged prompts with the plain model on eager attention.

    With `compiled` the decoding steps are those that torch compiled.
    Raises UnsupportedModel, naming the first decoder layer that differs where there is one.
    """
    try:
        prompts = [
            build_prompt(
                mllm,
                [{"role": "user", "content": [{"type": "image", "image": picture()}, {"type": "text", "text": text}]}],
            )
            for text in ("What is this?", "Describe the picture in a few words, then say what is missing.")
        ]
        references = [_reference(mllm, prompt) for prompt in prompts]
        ours = _engine_logits(mllm, prompts, [tokens for tokens, _ in references], compiled)
    except UnsupportedModel:
        raise
    except Exception as error:
        reason = (
            "its chat template or processor refused the check's prompt"
            if isinstance(error, RequestError)
            else "it failed"
        )
        raise UnsupportedModel(f"{mllm.name} cannot be served: {reason} in the self-check: {error!r}") from error
    for prompt, (_, expected), got in zip(prompts, references, ours, strict=True):
        scale = float(expected.abs().max().clamp(min=1e-6))
        difference = (expected - got).abs().amax(-1) / scale  # (steps,)
        if not bool((difference <= TOLERANCE.get(mllm.dtype, HALF_TOLERANCE)).all()):
            step = int((~(difference <= TOLERANCE.get(mllm.dtype, HALF_TOLERANCE))).nonzero()[0])
            where = f"decoding step {step}" if step else _first_difference(mllm, prompt)
            raise UnsupportedModel(
                f"{mllm.name} cannot be served exactly: its logits differ from the plain model's by "
                f"{float(difference[step]):.1e} of their range, first at {where}."
            )


def picture() -> Image.Image:
    """A small picture that every processor takes."""
    return Image.linear_gradient("L").resize((112, 84)).convert("RGB")


@contextmanager
def plain(mllm: MLLM, implementation: str = "eager") -> Iterator[nn.Module]:
    """The model with one of transformers' own attention implementations in its language model."""
    mllm.model.set_attn_implementation({"text_config": implementation})
    try:
        yield mllm.model
    finally:
        mllm.model.set_attn_implementation({"text_config": NAME})
        if hasattr(mllm.model.model, "rope_deltas"):
            mllm.model.model.rope_deltas = None


def _reference(mllm: MLLM, prompt: Prompt) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens (steps) and logits (steps, vocabulary) of plain `generate()`."""
    inputs = {name: value.to(mllm.device) for name, value in prompt.inputs.items()}
    with plain(mllm) as model:
        out = model.generate(  # type: ignore[operator]
            **inputs,
            max_new_tokens=STEPS,
            min_new_tokens=STEPS,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    return out.sequences[0, prompt.length :].tolist(), torch.cat(out.logits).float()


def _engine_logits(mllm: MLLM, prompts: list[Prompt], tokens: list[list[int]], compiled: bool) -> list[torch.Tensor]:
    """Logits (steps, vocabulary) of the engine for each prompt, the reference's tokens forced on it, in one batch."""
    length = max(prompt.length for prompt in prompts) + STEPS
    slots = len(prompts) + 1  # as in use, where most steps leave some slots out
    runner = Runner(mllm, slots, length, max_images=1, image_cache=ImageCache(0), compiled=compiled)
    sequences = [_sequence(mllm, prompt, slot) for slot, prompt in enumerate(prompts)]
    logits = []
    for sequence in sequences:
        first = runner.prefill([sequence], budget=sequence.prompt.length // 2 + 1)
        if first is None:
            first = runner.prefill([sequence], budget=sequence.prompt.length)
        assert first is not None
        runner.next_tokens([sequence], first)
        logits.append([first[0]])
    for step in range(STEPS - 1):
        for sequence, forced in zip(sequences, tokens, strict=True):
            sequence.tokens.append(forced[step])
            runner.token[sequence.slot] = forced[step]
        for row, got in enumerate(runner.decode_logits(sequences)):
            logits[row].append(got)
    return [torch.stack(rows) for rows in logits]


def _sequence(mllm: MLLM, prompt: Prompt, slot: int) -> Sequence:
    text = TextStream(mllm.tokenizer, ())
    return Sequence(prompt, Sampling(), STEPS, 0, text, notify=lambda *_: None, slot=slot)


def _first_difference(mllm: MLLM, prompt: Prompt) -> str:
    """Name the first decoder layer whose output differs in prefill."""
    with plain(mllm) as model, _recorded(mllm) as expected:
        model(**{name: value.to(mllm.device) for name, value in prompt.inputs.items()}, use_cache=False)
    runner = Runner(mllm, 1, prompt.length + 1, max_images=1, image_cache=ImageCache(0))
    with _recorded(mllm) as got:
        runner.prefill([_sequence(mllm, prompt, 0)], budget=prompt.length)
    tolerance = TOLERANCE.get(mllm.dtype, HALF_TOLERANCE)
    for layer, (one, other) in enumerate(zip(expected, got, strict=True)):
        difference = (one.float() - other.float()).norm(dim=-1) / one.float().norm(dim=-1).clamp(min=1e-6)  # (1, n)
        if not bool((difference <= tolerance).all()):
            return f"decoder layer {layer} ({type(mllm.layers[layer]).__name__})"
    return "the prompt's last logits"


@contextmanager
def _recorded(mllm: MLLM) -> Iterator[list[torch.Tensor]]:
    """The outputs of all decoder layers, in order of their calls."""
    outputs: list[torch.Tensor] = []
    handles = [
        layer.register_forward_hook(lambda module, args, output: outputs.append(output)) for layer in mllm.layers
    ]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()
