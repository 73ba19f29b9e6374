"""The independent computation: transformers alone, on eager attention, without a line of the engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, LogitsProcessor, LogitsProcessorList

from steering.model.processing.processor import load_processor
from tests import families

Messages = list[dict[str, Any]]
Addition = tuple[torch.Tensor, str]
"""A tensor added to the residual stream, (layers, d), and its tokens: all, prompt, generated, image or text."""


@dataclass(frozen=True)
class Answer:
    """The results of plain `generate()` with one prompt of n tokens.

    logits: (steps, vocabulary) before any processing. attention: (layers, n + steps - 1, n + steps - 1), mean over heads,
    the rows of the prompt and of every generated token that was fed. hidden: (layers, n + steps - 1, d), the residual stream
    after each layer, before what was added to it there.
    """

    ids: torch.Tensor
    tokens: list[int]
    logits: torch.Tensor
    attention: torch.Tensor
    hidden: torch.Tensor

    @property
    def logprobs(self) -> torch.Tensor:
        return self.logits.log_softmax(-1)

    @property
    def prompt_length(self) -> int:
        return len(self.ids)


class Plain:
    """A checkpoint as transformers loads and runs it.

    `attending` are the numbers of the layers with softmax attention, of which transformers returns weights.
    """

    def __init__(self, folder: Path):
        self.model: Any = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").eval()
        self.processor: Any = load_processor(folder)
        self.tokenizer = self.processor.tokenizer
        self.layers = self.model.get_decoder().layers
        self.attending = [number for number, layer in enumerate(self.layers) if hasattr(layer, "self_attn")]

    def inputs(self, messages: Messages) -> dict[str, torch.Tensor]:
        """Return the model's inputs for a conversation, from the processor alone."""
        text = self.processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        bos = self.tokenizer.bos_token
        pictures = families.images_of(messages)
        output = self.processor(
            text=[text],
            images=[pictures] if pictures else None,
            return_tensors="pt",
            add_special_tokens=bos is None or not text.startswith(bos),
        )
        return {name: value for name, value in output.items() if name != "labels"}

    @torch.inference_mode()
    def answer(
        self,
        messages: Messages,
        steps: int,
        *,
        add: Sequence[Addition] = (),
        forced: Sequence[int] | None = None,
        inputs: Mapping[str, torch.Tensor] | None = None,
    ) -> Answer:
        """Generate greedily, or along `forced` tokens, with vectors added by forward hooks."""
        inputs = self.inputs(messages) if inputs is None else inputs
        ids = inputs["input_ids"][0]
        processors = LogitsProcessorList([] if forced is None else [Force(len(ids), forced)])
        with self._hooked(ids == self.model.config.image_token_id, add) as hidden:
            out = self.model.generate(
                **inputs,
                max_new_tokens=steps,
                do_sample=False,
                logits_processor=processors,
                output_logits=True,
                output_attentions=True,
                return_dict_in_generate=True,
            )
        tokens = out.sequences[0, len(ids) :].tolist()
        return Answer(ids, tokens, torch.cat(out.logits).float(), _stacked(out.attentions), _by_layer(hidden))

    @contextmanager
    def _hooked(self, image: torch.Tensor, add: Iterable[Addition]) -> Iterator[list[list[torch.Tensor]]]:
        """Record what every layer gives and add the vectors; the first call of a layer is the prompt's."""
        seen: list[list[torch.Tensor]] = [[] for _ in self.layers]

        def hook(layer: int) -> Any:
            def after(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
                prompt = not seen[layer]
                seen[layer].append(output[0].clone())
                every = torch.ones(output.shape[1], dtype=torch.bool)
                for delta, tokens in add:
                    chosen = {
                        "all": every,
                        "prompt": every if prompt else ~every,
                        "generated": ~every if prompt else every,
                        "image": image if prompt else ~every,
                        "text": ~image if prompt else ~every,
                    }[tokens]
                    output = output + chosen[None, :, None] * delta[layer]
                return output

            return after

        with ExitStack() as stack:
            for number, layer in enumerate(self.layers):
                stack.enter_context(layer.register_forward_hook(hook(number)))
            yield seen


@torch.inference_mode()
def uncached(model: Any, inputs: Mapping[str, torch.Tensor], tokens: Sequence[int], **options: Any) -> Any:
    """Return the model's output for a prompt and tokens after it, computed without any cache."""
    extended = dict(inputs)
    for name, fill in (("input_ids", None), ("attention_mask", 1), ("mm_token_type_ids", 0), ("token_type_ids", 0)):
        if name in inputs:
            more = list(tokens) if fill is None else [fill] * len(tokens)
            extended[name] = torch.cat([inputs[name], torch.tensor([more], dtype=inputs[name].dtype)], 1)
    out = model(**extended, use_cache=False, **options)
    if hasattr(model.model, "rope_deltas"):
        model.model.rope_deltas = None
    return out


def scale_of(layer: Any) -> Any:
    """Return the factor of all that a layer hands on: its updates are those of a stream that was scaled before."""
    return getattr(layer, "layer_scalar", 1.0)


def ffn_of(layer: Any) -> Any:
    return getattr(layer, "mlp", None) or layer.feed_forward


def gates_of(layer: Any) -> Any:
    """Return the module of a layer's FFN that makes its gates, and perhaps more behind them; None without one."""
    ffn = ffn_of(layer)
    return next((getattr(ffn, name) for name in ("gate_proj", "gate_up_proj", "w1") if hasattr(ffn, name)), None)


class Force(LogitsProcessor):
    """Leaves only the next of the given tokens possible."""

    def __init__(self, prompt: int, tokens: Sequence[int]):
        self._prompt, self._tokens = prompt, tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        only = torch.full_like(scores, -torch.inf)
        only[:, self._tokens[input_ids.shape[1] - self._prompt]] = 0.0
        return only


def _by_layer(hidden: list[list[torch.Tensor]]) -> torch.Tensor:
    return torch.stack([torch.cat(calls) for calls in hidden])


def _stacked(steps: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
    """Return one matrix per layer from the attentions of every step, which see all columns or, windowed, the latest ones."""
    total = steps[0][0].shape[2] + len(steps) - 1
    out = torch.zeros(len(steps[0]), total, total)
    for layer in range(len(steps[0])):
        row = 0
        for step in steps:
            weights = step[layer][0].mean(0)  # (rows, columns)
            end = row + len(weights)
            columns = min(weights.shape[1], end)
            out[layer, row:end, end - columns : end] = weights[:, -columns:]
            row = end
    return out
