"""ONLY: the logits are contrasted, or joined, with those of the text's attention in a single layer, without a second pass.

Wan et al. 2025, "ONLY: One-Layer Intervention Sufficiently Mitigates Hallucinations in Large Vision-Language Models", arXiv
2507.00898, section 3. At one layer the heads are ranked by their text-to-visual entropy ratio; those below the mean are left
out of the layer's attention output, which gives a second, textually enhanced distribution. Where it is near to the first
one, both logits are added, else the second is subtracted.

The paper says little of how the layer's output becomes logits. The authors' code does (github.com/zifuwan/ONLY: LlamaModel
and LlamaAttention in its modeling_llama.py, llava_llama.py and only_sample.py), and is followed, for the last token alone,
the only one that it uses:

- text is everything but pictures and the prompt's first token. In each head the weights of text, and those of pictures,
  above their mean plus standard deviation (n - 1) are set to 0, in the entropies and in the output. The prompt's first token
  counts in neither entropy, and keeps its weight in the output;
- entropies are of weights divided by their sum, with 1e-6 within the logarithm. An undefined entropy is 0 for text and
  infinite for pictures;
- the output e of the remaining heads skips all layers before the last one. There it becomes x = norm(e) + 0.2 * h, with h
  the layer's input, and then x + FFN(norm(x)), without attention. Where the last layer is the chosen one, e stays as it is;
- the logits are those of norm(x) + 0.5 * (the normalised last state);
- the distance is the sum of |p - q| over tokens, from 0 to 2. `beta` cuts tokens off as in VCD.

The defaults are those of its script for POPE, where `gamma` is 0.2; it is 0.25 in that for CHAIR.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from pydantic import Field
from torch import nn

from steering.decoder.hooks import AttentionHook, Hook, LayerHook
from steering.decoder.kernels import weighted
from steering.decoder.updates import Updates
from steering.devices import fill_slot, to_device
from steering.errors import RequestError
from steering.forwards import own_forwards
from steering.model.mllm import MLLM
from steering.prompt.layout import Prompt
from steering.prompt.spans import FIRST_IMAGE
from steering.protocol.intervention_spec import LAYERS, Options
from steering.protocol.sequence import Sequence
from steering.protocol.slots import Computed, DecodeBatch, Pool, PrefillChunk, Reuse, Slots
from steering.protocol.wording import shown

NAME = "only"
OF_INPUT, OF_LAST_STATE = 0.2, 0.5
"""The shares of the last layer's input and of the last state in the textual state (authors' code)."""
TINY = 1e-6
MODULES = ("input_layernorm", "post_attention_layernorm", "mlp", "self_attn.o_proj")
"""The parts of a layer that are used, by the names that Llama and its likes give them."""


class Only(Options):
    """Contrast or join the logits with those of a layer's attention to the text (ONLY).

    At `layer` the heads with the higher text-to-visual entropy ratio give a second distribution. Where the sum of its
    absolute differences from the first is below `gamma`, the logits are l + `collaborate` * l2, else (1 + `contrast`) * l -
    `contrast` * l2. Tokens less likely than `beta` times the likeliest one are impossible. Wan et al. 2025, section 3, as in
    the authors' code. Raises RequestError for values out of range.
    """

    path = (NAME,)
    needs_image = True

    layer: int = Field(0, ge=0, json_schema_extra={LAYERS: -1})
    gamma: float = Field(0.2, ge=0, le=2)
    collaborate: float = Field(3.0, ge=0, le=10)
    contrast: float = Field(1.0, ge=0, le=10)
    beta: float = Field(0.1, ge=0, le=1)

    def check(self, mllm: MLLM, prompt: Prompt) -> None:
        if self.layer >= mllm.num_layers:
            raise RequestError(
                f"'only.layer' must be below {mllm.num_layers}, the model's layers; got {shown(self.layer)}.",
                param="only.layer",
            )
        layers = (mllm.layers[self.layer], mllm.layers[-1])
        if mllm.final_norm is None or not all(map(_is_like_llama, layers)):
            raise RequestError(
                f"'only' needs layers built like Llama's, with the parts {', '.join(MODULES)}, which {mllm.name} lacks.",
                param=NAME,
                code="unsupported_value",
            )

    def report(self, measured: Any) -> dict[str, Any]:
        """Report the settings and for how many tokens the logits were joined, contrasted, and changed in their likeliest.

        measured: `Decided`.
        """
        return {**self.settings(), **measured._asdict()}


class Decided(NamedTuple):
    """The numbers of tokens for which logits were added, and subtracted, and whose likeliest token `changed`."""

    collaborative: int
    contrastive: int
    changed: int


def _is_like_llama(layer: nn.Module) -> bool:
    def has(name: str) -> bool:
        part: Any = layer
        for step in name.split("."):
            part = getattr(part, step, None)
        return part is not None

    if not all(map(has, MODULES)) or has("pre_feedforward_layernorm"):
        return False
    attention: Any = layer.self_attn
    queries = getattr(getattr(attention, "q_proj", None), "out_features", None)
    return queries in (None, attention.o_proj.in_features)  # otherwise they bring a gate of the output


def without_peaks(weights: torch.Tensor, among: torch.Tensor) -> torch.Tensor:
    """Return weights (rows, heads, columns) `among` some columns, 0 elsewhere and above their mean plus deviation.

    among: (rows, 1, columns) bool.
    """
    count = among.sum(-1, keepdim=True)
    inside = weights * among
    mean = inside.sum(-1, keepdim=True) / count
    variance = ((weights - mean).square() * among).sum(-1, keepdim=True) / (count - 1)
    return inside.masked_fill(inside > mean + variance.sqrt(), 0.0)


def entropy(weights: torch.Tensor, undefined: float) -> torch.Tensor:
    """Return the entropy (rows, heads) in nats of weights (rows, heads, columns) divided by their sum."""
    shares = weights / weights.sum(-1, keepdim=True)
    return (-(shares * (shares + TINY).log()).sum(-1)).nan_to_num(nan=undefined)


class OnlyRows(AttentionHook, LayerHook):
    """Gathers the last token's textual attention output at each row's layer, and the last layer's input.

    layers: (rows,) the row's layer, -1 where it does not ask. used: these layers. images: (rows, columns) bool. last:
    (rows,) the column of each row's last token; queries: (rows, 1), in a prefill, its index in the chunk. `output` and
    `before`: (rows, d).
    """

    output: torch.Tensor
    before: torch.Tensor

    def __init__(
        self,
        mllm: MLLM,
        layers: torch.Tensor,
        used: list[int],
        images: torch.Tensor,
        last: torch.Tensor,
        queries: torch.Tensor | None = None,
    ):
        self.asked = torch.zeros(len(layers), 1, 1, 1, dtype=torch.bool, device=layers.device)  # it changes no weights
        self.queries = queries
        self._mllm, self._layers, self._used = mllm, layers, used
        self._images, self._last = images, last
        self.output = torch.zeros(len(layers), mllm.hidden_size, dtype=mllm.dtype, device=layers.device)

    def reads(self, layer: int) -> bool:
        return layer in self._used

    def read(self, layer: int, weights: torch.Tensor, value: torch.Tensor) -> None:
        columns = torch.arange(weights.shape[-1], device=weights.device)
        images = self._images[:, None, : len(columns)].to(weights.device)
        visible = (columns <= self._last.to(weights.device)[:, None])[:, None]  # (rows, 1, columns)
        is_text = visible & ~images & (columns > 0)
        own = weights[:, :, 0].float()  # (rows, heads, columns)
        text, visual = without_peaks(own, is_text), without_peaks(own, visible & images)
        ratio = entropy(text, 0.0) / entropy(visual, math.inf)
        mean = self._mllm.ranks.mean(ratio.mean(-1, keepdim=True))
        combined = text + visual + own * (visible & ~is_text & ~images)
        combined = combined.masked_fill((ratio < mean)[..., None], 0.0)
        attended = weighted(combined[:, :, None], value).transpose(1, 2).flatten(2)  # (rows, 1, heads * head_dim)
        attention: Any = self._mllm.layers[layer].self_attn
        output = _own(attention.o_proj, attended)[:, 0].to(self.output.device)
        self.output = torch.where((self._layers == layer)[:, None], output, self.output)

    def after(
        self, layer: int, before: torch.Tensor, plain: torch.Tensor, hidden: torch.Tensor, updates: Updates
    ) -> torch.Tensor:
        if layer == self._mllm.num_layers - 1:
            if self.queries is None:
                self.before = before[:, -1]
            else:
                rows = torch.arange(len(before), device=before.device)
                self.before = before[rows, self.queries[:, 0].clamp(min=0).to(before.device)]
        return hidden

    def textual(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the states (rows, d) of the textual logits. hidden: (rows, d), the normalised last states."""
        mllm = self._mllm
        layer: Any = mllm.layers[-1]
        final = mllm.num_layers - 1
        output = self.output.to(self.before.device)[:, None]
        state = OF_INPUT * self.before[:, None] + _own(layer.input_layernorm, output)
        state = state + _own(layer.mlp, _own(layer.post_attention_layernorm, state))
        is_final = (self._layers == final)[:, None, None].to(state.device)
        return mllm.normalised(torch.where(is_final, output, state)[:, 0]) + OF_LAST_STATE * hidden


def _own(module: nn.Module, states: torch.Tensor) -> torch.Tensor:
    """Return a module's output (rows, 1, d) by its own forward pass, which other kernels may have replaced."""
    with own_forwards():
        output = module(states)
    return output[0] if isinstance(output, tuple) else output


class OnlySlots(Slots):
    """The settings and the textual state of every slot.

    layer: (slots,), -1 where nothing was requested. images: (slots, length) bool. numbers: (slots, 4), gamma, collaborate,
    contrast and the logarithm of beta. state: (slots, d), of the last token. decided: (slots, length), by token of the
    answer, 1 if logits were added, 2 if subtracted, and 4 more if its likeliest token changed.
    """

    measured = ("state",)

    def __init__(self, name: str, pool: Pool):
        super().__init__(name, pool)
        mllm, slots, device = pool.mllm, pool.slots, pool.device
        self.layer = torch.full((slots,), -1, dtype=torch.int64, device=device)
        self.images = torch.zeros(slots, pool.length, dtype=torch.bool, device=device)
        self.numbers = torch.zeros(slots, 4, device=device)
        self.state = torch.zeros(slots, mllm.hidden_size, dtype=mllm.dtype, device=device)
        self.decided = torch.zeros(slots, pool.length, dtype=torch.int64, device=device)

    def place(self, sequence: Sequence) -> None:
        only, slot, spans = _options(sequence), sequence.slot, sequence.prompt.layout.spans
        fill_slot(self.layer, slot, -1 if only is None else only.layer)
        if only is None:
            return
        self.images[slot] = False
        self.images[slot, : len(spans)] = to_device(spans >= FIRST_IMAGE, self.images)
        cut = math.log(only.beta) if only.beta else -math.inf
        numbers = torch.tensor([only.gamma, only.collaborate, only.contrast, cut])
        self.numbers[slot] = to_device(numbers, self.numbers)

    def prefill(self, chunk: PrefillChunk) -> OnlyRows | None:
        if not chunk.complete:
            return None
        asks = torch.tensor([_options(sequence) is not None for sequence in chunk.sequences])
        queries = torch.where(asks, chunk.last, -1)[:, None]
        last = to_device(torch.tensor(chunk.starts) + chunk.last, self.layer.device)
        return self._rows(chunk.rows, chunk.sequences, last, to_device(queries, self.layer.device))

    def reuse(self, sequence: Sequence) -> Reuse:
        return Reuse(sequence.prompt.length)  # nothing is changed, and only the prompt's last row is looked at

    def decode(self, batch: DecodeBatch) -> OnlyRows | None:
        return self._rows(batch.rows, batch.sequences, batch.positions, None)

    def prepare_logits(self, batch: PrefillChunk | DecodeBatch, hook: Hook | None, computed: Computed) -> None:
        if not isinstance(hook, OnlyRows):
            return
        hidden, rows = computed.hidden, torch.arange(len(computed.hidden), device=computed.hidden.device)
        last = hidden[:, -1] if hook.queries is None else hidden[rows, hook.queries[:, 0].clamp(min=0)]
        state = self.state[batch.rows]
        self.state[batch.rows] = batch.latest(hook.textual(last).to(state.dtype), state)

    def logits(self, sequences: list[Sequence], slots: slice | torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        rows = [(row, sequence) for row, sequence in enumerate(sequences) if _options(sequence) is not None]
        if not rows:
            return logits
        places = torch.tensor([[row, sequence.slot, len(sequence.tokens)] for row, sequence in rows])
        at, slot, token = to_device(places, logits.device).unbind(1)
        gamma, collaborate, contrast, cut = self.numbers[slot].split(1, -1)
        full = logits[at]
        impossible = full == -torch.inf
        textual = self.pool.mllm.head(self.state[slot]).masked_fill(impossible, -torch.inf)
        apart = (full.softmax(-1) - textual.softmax(-1)).abs().sum(-1, keepdim=True)
        near = apart < gamma
        combined = torch.where(near, full + collaborate * textual, (1 + contrast) * full - contrast * textual)
        combined = combined.masked_fill(impossible | (full < full.amax(-1, keepdim=True) + cut), -torch.inf)
        changed = combined.argmax(-1) != full.argmax(-1)
        self.decided[slot, token] = torch.where(near[:, 0], 1, 2) + 4 * changed
        return logits.index_copy(0, at, combined)

    def take(self, sequence: Sequence) -> Decided | None:
        if _options(sequence) is None:
            return None
        decided = self.decided[sequence.slot, : len(sequence.tokens)].cpu()
        return Decided(int((decided % 4 == 1).sum()), int((decided % 4 == 2).sum()), int((decided > 4).sum()))

    def _rows(
        self, rows: slice, sequences: list[Sequence], last: torch.Tensor, queries: torch.Tensor | None
    ) -> OnlyRows | None:
        used = sorted({only.layer for sequence in sequences if (only := _options(sequence)) is not None})
        if not used:
            return None
        return OnlyRows(self.pool.mllm, self.layer[rows], used, self.images[rows], last, queries)


def _options(sequence: Sequence) -> Only | None:
    only = sequence.spec.asked.get(NAME)
    return only if isinstance(only, Only) else None
