"""VISTA: what the images add to the states is added to every layer, and early layers' logits are mixed into the last ones.

Li et al. 2025, "The Hidden Life of Tokens: Reducing Hallucination of Large Vision-Language Models via Visual Information
Steering", arXiv 2502.03628, section 4. It has two parts:

- the visual steering vector (VSV, section 4.1): v of a layer is the difference of two states behind it, at the last token of
  the prompt and of the prompt without its images. A prelude of two requests measures it for each request anew;
- self-logits augmentation (SLA, section 4.2): logits become (1 - alpha) * logits + alpha * the mean of those of a window of
  late layers.

The authors' code (github.com/LzVv123456/VISTA: steering_vector.py, llm_layers.py, llava_llama.py) is the default:

- v is added to what the FFN adds, f, not to the residual stream. With n(.) for scaling to length 1, f becomes
  |f| * n(n(f) + strength * s * n(v)), s = 1 + max(0, cos(f, -v)), for all tokens, those of the prompt too. `place`
  "residual" adds strength * v to the layer's output, which is the paper's formula without its norms;
- the head is applied to the window's states as they are; `normalise` applies the final norm before. The window is layers 25
  to 30 of 32, so that by default it is the six layers before the last. The mean is taken of states, which gives the same
  logits, as heads are linear.

One thing is left out: a PCA of the single difference, which has no variance, and there adds 1 or -1 to one of its numbers.
In families whose layers scale or normalise the FFN's output, f is what is added to the residual stream.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from collections.abc import Sequence as Rows
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import ConfigDict, Field

from steering.decoder.hooks import Hook, LayerHook
from steering.decoder.updates import Updates
from steering.devices import fill_slot, to_device
from steering.errors import RequestError
from steering.model.mllm import MLLM
from steering.prompt.chat import pictures_of, without_images
from steering.prompt.layout import Prompt
from steering.prompt.tokens import TokenChoice
from steering.protocol.intervention import Prelude, Rounds
from steering.protocol.intervention_spec import LayerList, Options, TokenWord, check_choice, check_layers
from steering.protocol.request import RENDERED_BY, Request, Sampling
from steering.protocol.sequence import Sequence
from steering.protocol.slots import Computed, DecodeBatch, Pool, PrefillChunk, Reuse, Slots

NAME = "vista"
WINDOW = 6
"""How many layers before the last one the window has by default."""


class _VistaOptions(Options):
    """The options of both forms of VISTA."""

    path = (NAME,)
    needs_image = True

    strength: float = Field(0.1, ge=0, le=10)
    layers: LayerList | None = None
    tokens: TokenWord = "all"
    place: Literal["ffn", "residual"] = "ffn"
    alpha: float = Field(0.3, ge=0, le=1)
    window: LayerList | None = None
    normalise: bool = False

    @property
    def chosen(self) -> TokenChoice:
        """The tokens that are steered."""
        return TokenChoice(self.tokens)

    def steered(self, count: int) -> list[int]:
        """Return the layers, of `count`, that are steered."""
        return [] if not self.strength else sorted(self.layers) if self.layers is not None else list(range(count))

    def mixed(self, count: int) -> list[int]:
        """Return the layers, of `count`, whose logits are mixed in."""
        if not self.alpha:
            return []
        return sorted(self.window) if self.window is not None else list(range(max(0, count - 1 - WINDOW), count - 1))

    def check_model(self, mllm: MLLM) -> None:
        """Raise RequestError where the options do not fit a model."""
        check_layers(self.layers, mllm.num_layers, "vista.layers")
        check_layers(self.window, mllm.num_layers, "vista.window")
        if self.strength and self.place == "ffn":
            mllm.need_updates("vista.place")
        if self.normalise and mllm.final_norm is None:
            raise RequestError(
                f"'vista.normalise' needs the final norm, which was not found in {mllm.name}.", param="vista.normalise"
            )


class Vista(_VistaOptions, Prelude):
    """Add what the images add to the states, and mix in late layers' logits (VISTA).

    In `layers`, by default all, a vector of the request's own images, measured beforehand, is added with `strength` to what
    the FFN adds, or to the `residual` stream, for `tokens`. Logits become (1 - `alpha`) * logits + `alpha` * the mean of
    those of the layers in `window`, by default the six before the last. `normalise` applies the final norm to their states.
    Li et al. 2025, section 4, as in the authors' code. Raises RequestError for values out of range.
    """

    def rounds(self, mllm: MLLM, request: Request) -> Rounds:
        self.check_model(mllm)
        if not pictures_of(request.chat):
            raise RequestError("'vista' needs an image in the request.", param=NAME)
        check_choice(self.chosen, len(pictures_of(request.chat)), "vista.tokens")
        settings = {name: getattr(self, name) for name in _VistaOptions.model_fields}
        if not self.strength:
            return VistaSteering(**settings)
        if mllm.needs_images:
            raise RequestError(
                f"'vista' needs the prompt without its images, but every prompt of {mllm.name} needs one.", param=NAME
            )
        results = yield [_measuring(request, chat) for chat in (request.chat, without_images(request.chat))]
        pictured, unpictured = (result.choices[0].states for result in results)
        assert pictured is not None
        assert unpictured is not None
        return VistaSteering(**settings, directions=pictured.float() - unpictured.float())


class VistaSteering(_VistaOptions):
    """VISTA with its vectors. directions: (layers, d) float32; None where nothing is steered."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    directions: torch.Tensor | None = Field(None, exclude=True, repr=False)

    def check(self, mllm: MLLM, prompt: Prompt) -> None:
        self.check_model(mllm)
        check_choice(self.chosen, len(prompt.layout.images), "vista.tokens")

    @property
    def digest(self) -> bytes:
        """A hash of the vectors."""
        assert self.directions is not None
        return hashlib.sha256(self.directions.contiguous().numpy().tobytes()).digest()

    def report(self, measured: Any) -> dict[str, Any]:
        """Report the settings, the layers that were steered and mixed in, and the vectors' mean length.

        measured: the numbers of layers and of touched tokens.
        """
        count, touched = measured
        steered = self.steered(count)
        length = None
        if steered and self.directions is not None:
            length = float(self.directions[steered].norm(dim=-1).mean())
        effect = {
            "layers": steered,
            "window": self.mixed(count),
            "touched": touched if steered else 0,
            "length": length,
        }
        return {**self.settings(), **effect}


def _measuring(request: Request, chat: Rows[Mapping[str, Any]]) -> Request:
    """Return the request that measures the states of a chat, rendered and cached as another request."""
    alike = {name: getattr(request, name) for name in ("cache_salt", *RENDERED_BY)}
    tools = None if request.tools is None else replace(request.tools, required=False)
    return Request(chat, Sampling(max_tokens=1), states=True, tools=tools, **alike)


def with_vector(ffn: torch.Tensor, direction: torch.Tensor, strength: torch.Tensor) -> torch.Tensor:
    """Return the FFN's addition (rows, n, d) steered toward a direction (rows, 1, d), at its own length, in float32.

    strength: (rows, 1, 1).
    """
    ffn = ffn.float()
    away = 1 + F.cosine_similarity(ffn, -direction, dim=-1).clamp(min=0)[..., None]
    steered = F.normalize(ffn, dim=-1) + strength * away * F.normalize(direction, dim=-1)
    return F.normalize(steered, dim=-1) * ffn.norm(dim=-1, keepdim=True)


class VistaRows(LayerHook):
    """Steers and gathers in one forward pass.

    directions: (rows, layers, d) float32. strength: (rows, layers), 0 where nothing is steered; steered: layers where some
    row is. residual: (rows,) bool, the place. touched: (rows, n), 1 on steered tokens. shares: (rows, layers), each layer's
    share in the mean state; mixed: layers where some row has one. norms: (rows,) bool, whose states are normalised. last:
    (rows,) the index of each row's last token. `early`: (rows, d).
    """

    early: torch.Tensor

    def __init__(
        self,
        mllm: MLLM,
        slots: VistaSlots,
        rows: slice,
        touched: torch.Tensor,
        steered: list[int],
        mixed: list[int],
        last: torch.Tensor,
    ):
        self._mllm, self._touched, self._last = mllm, touched, last
        self._directions, self._strength = slots.directions[rows], slots.strength[rows]
        self._residual, self._shares, self._norms = slots.residual[rows], slots.shares[rows], slots.norms[rows]
        self._steered, self._mixed = steered, mixed
        self.early = torch.zeros(len(touched), mllm.hidden_size, device=touched.device)

    def after(
        self, layer: int, before: torch.Tensor, plain: torch.Tensor, hidden: torch.Tensor, updates: Updates
    ) -> torch.Tensor:
        if layer in self._steered:
            hidden = self._add(layer, hidden, updates)
        if layer in self._mixed:
            rows = torch.arange(len(hidden), device=hidden.device)
            states = hidden[rows, self._last.to(hidden.device)].to(self.early.device)
            if self._mllm.final_norm is not None:
                states = torch.where(self._norms[:, None], self._mllm.normalised(states), states)
            self.early = self.early + self._shares[:, layer, None] * states.float()
        return hidden

    def _add(self, layer: int, hidden: torch.Tensor, updates: Updates) -> torch.Tensor:
        device = hidden.device
        direction = self._directions[:, layer, None].to(device)  # (rows, 1, d)
        strength = self._strength[:, layer, None, None].to(device)
        change = strength * direction
        if updates.known:
            ffn = updates.ffn
            of_ffn = with_vector(ffn, direction, strength) - ffn.float()
            change = torch.where(self._residual[:, None, None].to(device), change, of_ffn)
        steered = (hidden.float() + change).to(hidden.dtype)
        touched = (self._touched[..., None].to(device) * strength) > 0
        return torch.where(touched, steered, hidden)  # other rows keep every bit


class VistaSlots(Slots):
    """The vectors and the mean state of every slot.

    directions: (slots, layers, d) float32. strength: (slots, layers), 0 in layers that are not steered. residual, norms:
    (slots,) bool. generated: (slots, 1), 1 where generated tokens are steered. shares: (slots, layers), each layer's share
    in the mean state. alpha: (slots, 1). early: (slots, d) float32, the mean state at the last token.
    """

    measured = ("early",)

    def __init__(self, name: str, pool: Pool):
        super().__init__(name, pool)
        slots, layers, width, device = pool.slots, pool.layers, pool.mllm.hidden_size, pool.device
        self.directions = torch.zeros(slots, layers, width, device=device)
        self.strength = torch.zeros(slots, layers, device=device)
        self.shares = torch.zeros(slots, layers, device=device)
        self.residual = torch.zeros(slots, dtype=torch.bool, device=device)
        self.norms = torch.zeros(slots, dtype=torch.bool, device=device)
        self.generated = torch.zeros(slots, 1, device=device)
        self.alpha = torch.zeros(slots, 1, device=device)
        self.early = torch.zeros(slots, width, device=device)

    def place(self, sequence: Sequence) -> None:
        vista, slot, count = _options(sequence), sequence.slot, self.pool.layers
        strength, shares = torch.zeros(count), torch.zeros(count)
        if vista is not None:
            if vista.directions is not None:
                self.directions[slot] = to_device(vista.directions, self.directions)
                strength[vista.steered(count)] = vista.strength
            mixed = vista.mixed(count)
            shares[mixed] = 1 / max(1, len(mixed))
        self.strength[slot] = to_device(strength, self.strength)
        self.shares[slot] = to_device(shares, self.shares)
        fill_slot(self.residual, slot, vista is not None and vista.place == "residual")
        fill_slot(self.norms, slot, vista is not None and vista.normalise)
        fill_slot(self.generated, slot, vista is not None and vista.chosen.generated)
        fill_slot(self.alpha, slot, vista.alpha if vista is not None and vista.mixed(count) else 0)

    def prefill(self, chunk: PrefillChunk) -> VistaRows | None:
        row_options = map(_options, chunk.sequences)
        touched = chunk.touched(None if vista is None else vista.chosen for vista in row_options)
        device = self.early.device
        return self._rows(chunk.rows, chunk.sequences, to_device(touched, device), to_device(chunk.last, device))

    def reuse(self, sequence: Sequence) -> Reuse:
        vista = _options(sequence)
        if vista is None or not vista.steered(self.pool.layers):
            return Reuse(sequence.prompt.length)
        key = (vista.digest, vista.strength, vista.place, vista.tokens, tuple(vista.steered(self.pool.layers)))
        return Reuse(sequence.prompt.length, key)

    def decode(self, batch: DecodeBatch) -> VistaRows | None:
        last = torch.zeros(len(batch.sequences), dtype=torch.int64, device=self.early.device)
        return self._rows(batch.rows, batch.sequences, self.generated[batch.rows], last)

    def prepare_logits(self, batch: PrefillChunk | DecodeBatch, hook: Hook | None, computed: Computed) -> None:
        if isinstance(hook, VistaRows):
            self.early[batch.rows] = batch.latest(hook.early, self.early[batch.rows])

    def logits(self, sequences: list[Sequence], slots: slice | torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        count = self.pool.layers
        rows = [
            (row, sequence.slot)
            for row, sequence in enumerate(sequences)
            if (vista := _options(sequence)) is not None and vista.mixed(count)
        ]
        if not rows:
            return logits
        at, slot = to_device(torch.tensor(rows), logits.device).unbind(1)
        last, mllm = logits[at], self.pool.mllm
        early = mllm.head(self.early[slot].to(mllm.dtype))
        mixed = torch.lerp(last, early, self.alpha[slot]).masked_fill(last == -torch.inf, -torch.inf)
        return logits.index_copy(0, at, mixed)

    def take(self, sequence: Sequence) -> tuple[int, int] | None:
        if (vista := _options(sequence)) is None:
            return None
        prompt = vista.chosen.touched(sequence.prompt.layout.spans)
        return self.pool.layers, int(prompt.sum()) + sequence.fed * vista.chosen.generated

    def _rows(
        self, rows: slice, sequences: list[Sequence], touched: torch.Tensor, last: torch.Tensor
    ) -> VistaRows | None:
        count = self.pool.layers
        vistas = [vista for sequence in sequences if (vista := _options(sequence)) is not None]
        steered = sorted({layer for vista in vistas for layer in vista.steered(count)})
        mixed = sorted({layer for vista in vistas for layer in vista.mixed(count)})
        if not steered and not mixed:
            return None
        return VistaRows(self.pool.mllm, self, rows, touched, steered, mixed, last)


def _options(sequence: Sequence) -> VistaSteering | None:
    vista = sequence.spec.asked.get(NAME)
    return vista if isinstance(vista, VistaSteering) else None
