"""ProjectOut removes a direction from the residual stream: h <- h - (h . v) v at chosen layers, for chosen tokens.

v is the vector's direction at the layer, scaled to length 1; its weight and sign do not matter. This is directional ablation
as in Arditi et al. 2024, "Refusal in Language Models Is Mediated by a Single Direction" (arXiv 2406.11717, section 2.4), at
the outputs of layers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from steering.decoder.hooks import Hook, LayerHook
from steering.decoder.updates import Updates
from steering.devices import fill_slot, to_device
from steering.model.mllm import MLLM
from steering.prompt.layout import Prompt
from steering.prompt.tokens import TokenChoice
from steering.protocol.intervention_spec import LayerList, Options, TokenWord, check_choice, check_layers
from steering.protocol.sequence import Sequence
from steering.protocol.slots import Computed, DecodeBatch, Pool, PrefillChunk, Reuse, Slots
from steering.vectors.option import Vector, check_vector
from steering.vectors.vector import PREFERENCE, SteeringVector

NAME = "project_out"


class ProjectOut(Options):
    """Remove a direction from the residual stream: h - (h . v) v, v of length 1.

    `vector` is a steering vector of any kind, of which only the direction counts. `layers` are the layers from whose output
    it is removed, by default the vector's own. `tokens` are `all` or those of `prompt`, `generated`, `image`, `text`, or
    `image:2`. Arditi et al. 2024, section 2.4. Raises RequestError for any other value.
    """

    path = (NAME,)

    vector: Vector = PREFERENCE
    layers: LayerList | None = None
    tokens: TokenWord = "all"

    @property
    def chosen(self) -> TokenChoice:
        """The tokens from which the direction is removed."""
        return TokenChoice(self.tokens)

    @property
    def touched_layers(self) -> tuple[int, ...]:
        """The layers from whose output the direction is removed; the vector must have been checked."""
        assert isinstance(self.vector, SteeringVector)
        return self.vector.layers if self.layers is None else tuple(self.layers)

    @property
    def directions(self) -> torch.Tensor:
        """The directions, (layers, d) float32, of length 1 at its layers, zeros elsewhere and where the vector has none."""
        assert isinstance(self.vector, SteeringVector)
        out, index = torch.zeros_like(self.vector.direction), list(self.touched_layers)
        out[index] = torch.nn.functional.normalize(self.vector.direction[index], dim=-1)
        return out

    def check(self, mllm: MLLM, prompt: Prompt) -> None:
        check_vector(mllm, self.vector, "project_out.vector")
        check_layers(self.layers, mllm.num_layers, "project_out.layers")
        check_choice(self.chosen, len(prompt.layout.images), "project_out.tokens")

    def report(self, measured: Any) -> dict[str, Any]:
        """Report the settings and the share that was removed.

        measured: `Removed`. `removed` is |h . v| / |h|, the share of a state's length along the direction, mean over the
        touched tokens and layers; None where there were none.
        """
        values = measured.tokens * len(self.touched_layers)
        return {
            "vector": self.settings()["vector"],
            "digest": next(iter(self.digests.values()), None),
            "layers": list(self.touched_layers),
            "tokens": self.tokens,
            "touched": measured.tokens,
            "removed": measured.share / values if values else None,
        }


class Removed(NamedTuple):
    """The number of touched tokens, and `share`, the sum over them and over layers of |h . v| / |h|."""

    tokens: int
    share: float


class ProjectOutRows(LayerHook):
    """The projection of one forward pass.

    directions: (rows, layers, d) in float32, zeros where nothing is removed. touched: (rows, n), 1 on the tokens from which
    it is removed. Once settled, `by_token` (rows, n) is the sum over layers of the removed part, as a share of |h|.
    """

    by_token: torch.Tensor

    def __init__(self, directions: torch.Tensor, touched: torch.Tensor, layers: tuple[int, ...]):
        self._directions, self._touched, self._layers = directions, touched, layers
        self._shares: list[torch.Tensor] = []

    def after(
        self, layer: int, before: torch.Tensor, plain: torch.Tensor, hidden: torch.Tensor, updates: Updates
    ) -> torch.Tensor:
        if layer not in self._layers:
            return hidden
        direction = self._directions[:, layer, :, None].to(hidden.device)  # (rows, d, 1)
        along = hidden.float() @ direction * self._touched[..., None].to(hidden.device)  # (rows, n, 1)
        length = hidden.float().norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
        self._shares.append((along[..., 0].abs() / length).to(self._touched.device))
        removed = (hidden.float() - along * direction.transpose(1, 2)).to(hidden.dtype)
        return torch.where(along != 0, removed, hidden)  # other rows keep every bit

    def settle(self, positions: torch.Tensor | None) -> None:
        self.by_token, self._shares = torch.stack(self._shares).sum(0), []


class ProjectOutSlots(Slots):
    """The directions of every slot.

    directions: (slots, layers, d) float32, zeros where nothing was requested. generated: (slots, 1), 1 where generated
    tokens are touched. shares: (slots,), the sum of the shares removed from them so far.
    """

    def __init__(self, name: str, pool: Pool):
        super().__init__(name, pool)
        slots, device = pool.slots, pool.device
        self.directions = torch.zeros(slots, pool.layers, pool.mllm.hidden_size, device=device)
        self.generated = torch.zeros(slots, 1, device=device)
        self.shares = torch.zeros(slots, device=device)

    def place(self, sequence: Sequence) -> None:
        options, slot = _options(sequence), sequence.slot
        fill_slot(self.shares, slot, 0)
        fill_slot(self.generated, slot, options is not None and options.chosen.generated)
        if options is None:
            fill_slot(self.directions, slot, 0)
        else:
            self.directions[slot] = to_device(options.directions, self.directions)

    def prefill(self, chunk: PrefillChunk) -> ProjectOutRows | None:
        row_options = map(_options, chunk.sequences)
        touched = chunk.touched(None if options is None else options.chosen for options in row_options)
        return self._rows(chunk.rows, chunk.sequences, to_device(touched, self.directions.device))

    def keep(self, chunk: PrefillChunk, hook: Hook | None, computed: Computed) -> None:
        if isinstance(hook, ProjectOutRows):
            for row, sequence in enumerate(chunk.sequences):
                if _options(sequence) is not None:
                    sequence.captured.setdefault(NAME, []).append(hook.by_token[row, : chunk.lengths[row]])

    def reuse(self, sequence: Sequence) -> Reuse:
        if (options := _options(sequence)) is None:
            return Reuse(sequence.prompt.length)
        assert isinstance(options.vector, SteeringVector)
        key = (options.vector.digest, options.touched_layers, options.tokens)
        return Reuse(sequence.prompt.length, key, measured=True)

    def by_row(self, chunk: PrefillChunk, hook: Hook | None, computed: Computed) -> torch.Tensor | None:
        return hook.by_token[..., None] if isinstance(hook, ProjectOutRows) else None

    def regain(self, sequence: Sequence, measured: torch.Tensor) -> None:
        sequence.captured[NAME] = [measured[:, 0]]

    def decode(self, batch: DecodeBatch) -> ProjectOutRows | None:
        return self._rows(batch.rows, batch.sequences, self.generated[batch.rows])

    def record(self, batch: DecodeBatch, hook: Hook | None, computed: Computed) -> None:
        if isinstance(hook, ProjectOutRows):
            self.shares[batch.rows] += hook.by_token[:, 0] * batch.active[:, 0, 0]

    def take(self, sequence: Sequence) -> Removed | None:
        if (options := _options(sequence)) is None:
            return None
        prompt = options.chosen.touched(sequence.prompt.layout.spans)
        tokens = int(prompt.sum()) + sequence.fed * options.chosen.generated
        share = torch.cat(sequence.captured[NAME]).sum() + self.shares[sequence.slot]
        return Removed(tokens, float(share))

    def _rows(self, rows: slice, sequences: list[Sequence], touched: torch.Tensor) -> ProjectOutRows | None:
        chosen = [options.touched_layers for sequence in sequences if (options := _options(sequence)) is not None]
        layers = {layer for layers in chosen for layer in layers}
        return ProjectOutRows(self.directions[rows], touched, tuple(sorted(layers))) if chosen else None


def _options(sequence: Sequence) -> ProjectOut | None:
    options = sequence.spec.asked.get(NAME)
    return options if isinstance(options, ProjectOut) else None
