"""DoLa: the last layer's distribution is contrasted with that of an early layer.

Chuang et al. 2024, "DoLa: Decoding by Contrasting Layers Improves Factuality in Large Language Models", arXiv 2309.03883,
sections 2.1 to 2.3.

At every step the candidate layer whose distribution q diverges most from the last layer's p is chosen. Tokens less likely
under p than `relative_top` times the likeliest one become impossible; the others' logits are log p - log q.

The paper leaves some points open. They follow the authors' code (github.com/voidism/DoLa, dola.py and its
generation/utils.py), which transformers' own former implementation shares:
- the head is applied to early states as they are, without the final norm (`normalise` applies it);
- the divergence is the mean of KL(m || p) and KL(m || q), m = (p + q) / 2; the paper's is that of KL(p || m) and KL(q || m),
  which `divergence` "paper" selects. Both choose the layer with the largest;
- states are numbered as in that code: 0 is the embeddings, l the output of the first l layers.

The candidates of a `bucket` are those of transformers: every other state of the lower or the upper half or, in models with
more than 40 layers, of the first or the last 20. Where the head is the embedding matrix, they start from the second layer.
Unlike in that code each row chooses its own layer; there a batch shares one.

A grammar's mask and a twin's contrast come first: p is computed from the logits that they leave, and q over the same tokens.
Penalties, bias, temperature, log-probabilities and forced tokens come after it, as the authors' logits processors do.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from steering.decoder.hooks import Hook, LayerHook
from steering.decoder.updates import Updates
from steering.devices import fill_slot, to_device
from steering.errors import RequestError
from steering.model.mllm import MLLM
from steering.prompt.layout import Prompt
from steering.protocol.intervention_spec import LAYERS, Options
from steering.protocol.sequence import Sequence
from steering.protocol.slots import Computed, DecodeBatch, Pool, PrefillChunk, Reuse, Slots
from steering.protocol.wording import shown

NAME = "dola"
WIDE, MOST = 40, 20
"""The number of layers above which a bucket is capped, and its largest size then."""

State = Annotated[int, Field(ge=0, json_schema_extra={LAYERS: -1})]


class Dola(Options):
    """Contrast the logits with those of an early layer (DoLa).

    `premature` are the candidates: 0 is the embeddings, l the output of the first l layers; by default they are those of the
    `low` or `high` `bucket`. At each step the candidate whose distribution diverges most from the last layer's is used.
    Tokens less likely than `relative_top` times the likeliest one are impossible. `normalise` applies the final norm before
    the head; `divergence` is the released code's or the paper's. Chuang et al. 2024, sections 2.1 to 2.3. Raises
    RequestError for values out of range.
    """

    path = (NAME,)

    bucket: Literal["low", "high"] = "low"
    premature: list[State] | None = Field(None, max_length=1024)
    relative_top: float = Field(0.1, ge=0, le=1)
    normalise: bool = False
    divergence: Literal["released", "paper"] = "released"

    def check(self, mllm: MLLM, prompt: Prompt) -> None:
        count = mllm.num_layers
        if self.premature is not None and (not self.premature or not {*self.premature} <= {*range(count)}):
            raise RequestError(
                f"'dola.premature' must be numbers from 0, the embeddings, to {count - 1}, one layer before the last; got "
                f"{shown(self.premature)}.",
                param="dola.premature",
            )
        if self.normalise and mllm.final_norm is None:
            raise RequestError(
                f"'dola.normalise' needs the final norm, which was not found in {mllm.name}.", param="dola.normalise"
            )

    def candidates(self, mllm: MLLM) -> list[int]:
        """Return the numbers of the candidate states, in order."""
        if self.premature is not None:
            return sorted({*self.premature})
        return bucket(self.bucket, mllm.num_layers, bool(getattr(mllm.model.config, "tie_word_embeddings", False)))

    def report(self, measured: Any) -> dict[str, Any]:
        """Report the candidates and how often each was chosen.

        measured: by state, the number of tokens for which it was chosen.
        """
        return {
            **self.settings(),
            "premature": sorted(measured),
            "chosen": {str(state): measured[state] for state in sorted(measured)},
        }

    def brief(self, report: dict[str, Any]) -> dict[str, Any]:
        return report | {"chosen": {state: count for state, count in report["chosen"].items() if count}}


def bucket(name: str, layers: int, tied: bool) -> list[int]:
    """Return the candidate states of a bucket for a model with `layers` layers.

    tied: the head is the embedding matrix.
    """
    if name == "high":
        return list(range(layers // 2 if layers <= WIDE else layers - MOST, layers, 2))
    first = 0 if not tied else min(2, max(layers - 1, 0))
    end = layers // 2 if layers <= WIDE else MOST
    return list(range(first, end, 2)) or [first]


def divergences(last: torch.Tensor, early: torch.Tensor, released: torch.Tensor) -> torch.Tensor:
    """Return how far early layers' distributions are from the last layer's, in nats, (rows, candidates).

    last: (rows, 1, vocabulary), early: (rows, candidates, vocabulary), log-probabilities, -inf where a token is impossible.
    released: (rows, 1) bool, selects KL(m || .) instead of KL(. || m).
    """
    middle = torch.logaddexp(last, early) - math.log(2)
    possible = last > -torch.inf

    def mean(of: torch.Tensor) -> torch.Tensor:
        far = of - middle  # the log of a distribution's ratio to the mean of both
        weight = torch.where(released[..., None], -middle.exp(), of.exp())
        return torch.where(possible, weight * far, 0.0).sum(-1)

    return (mean(last) + mean(early)) / 2


class DolaRows(LayerHook):
    """Gathers the states of early layers in one forward pass.

    states: the states that any row needs, sorted. last: (rows,) the index of each row's last token. `early` then returns
    (rows, states, d).
    """

    def __init__(self, states: list[int], last: torch.Tensor | None):
        self.states = states
        self._last = last
        self._gathered: list[torch.Tensor] = []

    def after(
        self, layer: int, before: torch.Tensor, plain: torch.Tensor, hidden: torch.Tensor, updates: Updates
    ) -> torch.Tensor:
        if layer == 0 and 0 in self.states:
            self._gathered.append(self._states_at_last(before))
        if layer + 1 in self.states:
            self._gathered.append(self._states_at_last(hidden))
        return hidden

    def _states_at_last(self, states: torch.Tensor) -> torch.Tensor:
        if self._last is None:
            return states[:, -1]
        last = self._last.to(states.device)
        return states[torch.arange(len(last), device=states.device), last]

    def early(self, device: torch.device) -> torch.Tensor:
        """Return the gathered states, (rows, states, d)."""
        return torch.stack([states.to(device) for states in self._gathered], 1)


class DolaSlots(Slots):
    """The early states of every slot's last token, and the states that were chosen.

    candidates: (slots, layers) bool. early: (slots, layers, d), by the number of the state. top: (slots, 1), the logarithm
    of `relative_top`. released: (slots, 1) bool, the divergence to use. chosen: (slots, length), the chosen state by token
    of the answer.
    """

    measured = ("early",)

    def __init__(self, name: str, pool: Pool):
        super().__init__(name, pool)
        mllm, slots, device = pool.mllm, pool.slots, pool.device
        self.candidates = torch.zeros(slots, pool.layers, dtype=torch.bool, device=device)
        self.early = torch.zeros(slots, pool.layers, mllm.hidden_size, dtype=mllm.dtype, device=device)
        self.top = torch.zeros(slots, 1, device=device)
        self.released = torch.zeros(slots, 1, dtype=torch.bool, device=device)
        self.chosen = torch.zeros(slots, pool.length, dtype=torch.int64, device=device)

    def place(self, sequence: Sequence) -> None:
        dola, slot = _options(sequence), sequence.slot
        if dola is None:
            return  # a slot's old values are read by rows that use DoLa alone
        is_candidate = torch.zeros(self.pool.layers, dtype=torch.bool)
        is_candidate[dola.candidates(self.pool.mllm)] = True
        self.candidates[slot] = to_device(is_candidate, self.candidates)
        fill_slot(self.top, slot, math.log(dola.relative_top) if dola.relative_top else -math.inf)
        fill_slot(self.released, slot, dola.divergence == "released")

    def prefill(self, chunk: PrefillChunk) -> DolaRows | None:
        return self._rows(chunk.sequences, to_device(chunk.last, self.early.device)) if chunk.complete else None

    def reuse(self, sequence: Sequence) -> Reuse:
        return Reuse(sequence.prompt.length)  # the prompt is not changed

    def decode(self, batch: DecodeBatch) -> DolaRows | None:
        return self._rows(batch.sequences, None)

    def prepare_logits(self, batch: PrefillChunk | DecodeBatch, hook: Hook | None, computed: Computed) -> None:
        if not isinstance(hook, DolaRows):
            return
        index = to_device(torch.tensor(hook.states), self.early.device)
        early = self.early[batch.rows]
        early[:, index] = batch.latest(hook.early(early.device), early[:, index])

    def logits(self, sequences: list[Sequence], slots: slice | torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        rows = [(row, sequence) for row, sequence in enumerate(sequences) if _options(sequence) is not None]
        if not rows:
            return logits
        places = torch.tensor([[row, sequence.slot, len(sequence.tokens)] for row, sequence in rows])
        at, slot, token = to_device(places, logits.device).unbind(1)
        states = to_device(torch.tensor(self._states([sequence for _, sequence in rows])), logits.device)
        last, early = logits[at].log_softmax(-1), self._early_logits(rows, self.early[slot][:, states])
        early = early.masked_fill((last == -torch.inf)[:, None], -torch.inf).log_softmax(-1)
        far = divergences(last[:, None], early, self.released[slot])
        best = far.masked_fill(~self.candidates[slot][:, states], -torch.inf).argmax(-1)  # (rows,) of `states`
        self.chosen[slot, token] = states[best]
        contrasted = last - early[torch.arange(len(best), device=best.device), best]
        least = last.amax(-1, keepdim=True) + self.top[slot]
        return logits.index_copy(0, at, contrasted.masked_fill((last < least) | (last == -torch.inf), -torch.inf))

    def take(self, sequence: Sequence) -> dict[int, int] | None:
        dola = _options(sequence)
        if dola is None:
            return None
        counts = Counter(self.chosen[sequence.slot, : len(sequence.tokens)].tolist())
        return {state: counts[state] for state in dola.candidates(self.pool.mllm)}

    def _early_logits(self, rows: list[tuple[int, Sequence]], hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits (rows, states, vocabulary) of early states (rows, states, d)."""
        mllm = self.pool.mllm
        normalise = [(dola := _options(sequence)) is not None and dola.normalise for _, sequence in rows]
        if any(normalise):
            normalised_rows = to_device(torch.tensor(normalise), hidden.device)[:, None, None]
            hidden = torch.where(normalised_rows, mllm.normalised(hidden), hidden)
        return mllm.head(hidden)

    def _states(self, sequences: list[Sequence]) -> list[int]:
        mllm = self.pool.mllm
        dolas = [dola for sequence in sequences if (dola := _options(sequence)) is not None]
        return sorted({state for dola in dolas for state in dola.candidates(mllm)})

    def _rows(self, sequences: list[Sequence], last: torch.Tensor | None) -> DolaRows | None:
        states = self._states(sequences)
        return DolaRows(states, last) if states else None


def _options(sequence: Sequence) -> Dola | None:
    dola = sequence.spec.asked.get(NAME)
    return dola if isinstance(dola, Dola) else None
