"""The sampler: logits to tokens, every row with its own settings, without a loop over rows.

Randomness is a hash of (seed, position), so that a seeded answer does not depend on what else is in the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from steering.decoder.ranks import Ranks
from steering.devices import fill_slot, to_device
from steering.protocol.request import Sampling
from steering.runner.truncation import Truncation, truncated


@dataclass(frozen=True)
class Needs:
    """The sampling features that some row of a batch needs; the others are skipped for the whole batch."""

    sampling: bool
    truncation: bool
    repetition: bool
    counts: bool
    bias: bool
    least: bool
    top_logprobs: int | None

    @property
    def positions(self) -> bool:
        """True where a token's position in its answer matters."""
        return self.sampling or self.least

    @classmethod
    def of(cls, settings: list[Sampling], *, scored: bool = False) -> Needs:
        """Return the union over the rows of a batch. scored: log-probabilities of the tokens are read beside an answer."""
        if not scored and all(s.plain for s in settings):
            return NOTHING
        reported = [s.logprobs for s in settings if s.logprobs is not None]
        return cls(
            sampling=not all(s.greedy for s in settings),
            truncation=any(not s.greedy and (s.top_p < 1 or s.top_k > 0 or s.min_p > 0) for s in settings),
            repetition=any(s.repetition_penalty != 1 for s in settings),
            counts=any(s.frequency_penalty or s.presence_penalty for s in settings),
            bias=any(s.logit_bias for s in settings),
            least=any(s.min_tokens for s in settings),
            top_logprobs=max(reported) if reported else 0 if scored else None,
        )


LEAST_TOP_P = torch.finfo(torch.float32).tiny
"""The least top_p in float32, of which 0 would keep no token."""
NOTHING = Needs(False, False, False, False, False, False, None)


class Read(NamedTuple):
    """A sampled batch as numbers, one row each.

    finite: 0 where a row is not. alternatives: the token's log-probability, and the ids and log-probabilities of the
    likeliest ones; None when no row asks for them.
    """

    tokens: list[int]
    finite: Sequence[float]
    alternatives: list[tuple[float, list[int], list[float]]] | None


@dataclass
class Sampled:
    """A sampled batch as tensors.

    tokens: (rows,) int64; finite: (rows,) bool, False where a row's logits held a NaN or all were -inf; logprob: (rows,) of
    the token, top_logprob and top_id: (rows, k), None when no row asks for them.
    """

    tokens: torch.Tensor
    finite: torch.Tensor
    logprob: torch.Tensor | None = None
    top_logprob: torch.Tensor | None = None
    top_id: torch.Tensor | None = None

    def to_host(self) -> HostCopy:
        """Begin to copy everything to the CPU in one transfer, for which the host does not wait yet."""
        if self.logprob is None:
            return HostCopy(torch.stack((self.tokens, self.finite), 1))
        floats = self.logprob[:, None]
        parts = [self.tokens[:, None], self.finite[:, None]]
        if self.top_logprob is not None and self.top_id is not None:
            floats = torch.cat([floats, self.top_logprob], 1)
            parts.append(self.top_id)
        return HostCopy(torch.cat([*parts, floats.double().view(torch.int64)], 1), floats.shape[1])

    def agreed(self, ranks: Ranks) -> Sampled:
        """Return the same with the tokens of the first rank, so that all ranks continue one answer."""
        if ranks.size == 1:
            return self
        tokens, finite = ranks.agreed(torch.stack([self.tokens, self.finite.long()]))
        return replace(self, tokens=tokens, finite=finite.bool())


class HostCopy:
    """A sampled batch on its way to the CPU.

    packed: (rows, columns) int64 on the device: token, finite, the ids of the likeliest tokens, and the bits of `floats`
    log-probabilities, of the token and of the likeliest ones.
    """

    def __init__(self, packed: torch.Tensor, floats: int = 0):
        self._floats = floats
        self._arrived: torch.cuda.Event | None = None
        waits_later = packed.device.type == "cuda"  # elsewhere no event would tell when the copy is complete
        self._host = packed.to("cpu", non_blocking=waits_later)
        if waits_later:
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(packed.device))

    def read(self) -> Read:
        """Wait for the copy, and for nothing that was launched after it, and return its numbers."""
        if self._arrived is not None:
            self._arrived.synchronize()
        if not self._floats:
            tokens, finite = self._host.T.tolist()
            return Read(tokens, finite, None)
        numbers = self._host.tolist()
        logprobs = self._host[:, -self._floats :].contiguous().view(torch.float64).tolist()
        scored = [
            (logprob, row[2 : 1 + self._floats], likeliest)
            for row, (logprob, *likeliest) in zip(numbers, logprobs, strict=True)
        ]
        return Read([row[0] for row in numbers], [row[1] for row in numbers], scored)


class SamplerRows:
    """The settings of every slot as fixed tensors: (slots,) each; token tables (slots, vocabulary) only once needed."""

    _SCALARS = ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")

    def __init__(self, slots: int, vocabulary: int, stop_ids: Iterable[int], device: torch.device):
        self.stop_ids = torch.tensor(sorted(stop_ids), dtype=torch.int64, device=device)
        self._shape = (slots, vocabulary)
        self._device = device
        self._one, self._true = torch.ones(1, device=device), torch.ones(1, dtype=torch.bool, device=device)
        self.scalars = torch.zeros(slots, len(self._SCALARS), device=device)
        self.top_k = torch.zeros(slots, dtype=torch.int64, device=device)
        self.seed = torch.zeros(slots, dtype=torch.int64, device=device)
        self.may_end = torch.zeros(slots, dtype=torch.int64, device=device)  # first position of an end
        self.occurred: torch.Tensor | None = None  # True for tokens of the prompt and the answer
        self.generated: torch.Tensor | None = None  # count of each generated token
        self.bias: torch.Tensor | None = None

    def column(self, name: str, rows: slice | torch.Tensor) -> torch.Tensor:
        """Return one setting of some rows, (rows, 1)."""
        return self.scalars[rows, self._SCALARS.index(name), None]

    def limits(self, rows: slice | torch.Tensor) -> Truncation:
        """Return the truncation of some rows."""
        return Truncation(self.top_k[rows, None], self.column("top_p", rows), self.column("min_p", rows))

    def place(self, slot: int, sampling: Sampling, seed: int, prompt: torch.Tensor, generated: torch.Tensor) -> None:
        """Write a sequence's settings into its slot. prompt, generated: token ids so far."""
        if sampling.greedy:
            sampling = replace(sampling, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
        elif sampling.top_p < LEAST_TOP_P:
            sampling = replace(sampling, top_p=LEAST_TOP_P)
        self.scalars[slot] = to_device(
            torch.tensor([float(getattr(sampling, name)) for name in self._SCALARS]), self.scalars
        )
        fill_slot(self.top_k, slot, sampling.top_k)
        fill_slot(self.seed, slot, seed)
        fill_slot(self.may_end, slot, len(prompt) + sampling.min_tokens)
        needs = Needs.of([sampling])
        if needs.repetition and self.occurred is None:
            self.occurred = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
        if needs.counts and self.generated is None:
            self.generated = torch.zeros(self._shape, device=self._device)
        if needs.bias and self.bias is None:
            self.bias = torch.zeros(self._shape, device=self._device)
        if self.occurred is not None:
            tokens = torch.cat([prompt, generated])
            tokens = to_device(tokens[tokens < self._shape[1]], self._device)  # some inputs are never outputs
            self.occurred[slot].zero_().index_fill_(0, tokens, True)
        if self.generated is not None:
            tokens = to_device(generated, self._device)
            self.generated[slot].zero_().index_add_(0, tokens, self._one.expand(len(tokens)))
        if self.bias is not None:
            bias = torch.zeros(self._shape[1])
            bias[list(sampling.logit_bias)] = torch.tensor([*sampling.logit_bias.values()], dtype=bias.dtype)
            self.bias[slot] = to_device(bias, self.bias)

    def move(self, source: int, target: int) -> None:
        """Copy a slot's settings to another slot."""
        for tensor in (self.scalars, self.top_k, self.seed, self.may_end, self.occurred, self.generated, self.bias):
            if tensor is not None:
                tensor[target] = tensor[source]

    def count(self, rows: slice | torch.Tensor, tokens: torch.Tensor) -> None:
        """Count generated tokens (rows,) for the penalties."""
        if self.occurred is None and self.generated is None:
            return
        index = torch.arange(self._shape[0], device=self._device)[rows]
        if self.occurred is not None:
            self.occurred.index_put_((index, tokens), self._true)
        if self.generated is not None:
            self.generated[index, tokens] += 1


def sample(
    logits: torch.Tensor,
    settings: SamplerRows,
    rows: slice | torch.Tensor,
    positions: torch.Tensor | None,
    needs: Needs,
) -> Sampled:
    """Sample a token for each row.

    logits: (rows, vocabulary) float32; positions: (rows,) the position of the new token, None where these `needs` do not
    need it. The steps are in the order of transformers: penalties, bias, least length, temperature, top_k, top_p, min_p.
    """
    adjusted = logits
    if needs.repetition:
        adjusted = _penalise_repetition(adjusted, settings, rows)
    if needs.counts:
        adjusted = _penalise_counts(adjusted, settings, rows)
    if needs.bias and settings.bias is not None:
        adjusted = adjusted + settings.bias[rows]
    if needs.least:
        assert positions is not None
        early = positions < settings.may_end[rows]
        ends = adjusted[:, settings.stop_ids].masked_fill(early[:, None], -torch.inf)
        longer = adjusted.index_copy(1, settings.stop_ids, ends)
        over = longer.amax(-1, keepdim=True).isneginf()  # nothing else is possible: a grammar has reached its end
        adjusted = torch.where(over, adjusted, longer)
    greatest, tokens = adjusted.max(-1)
    if adjusted is not logits:
        greatest = logits.amax(-1)
    finite = greatest.abs() < torch.inf  # the maximum of a row with a NaN is NaN
    if needs.sampling:
        assert positions is not None
        temperature = settings.column("temperature", rows)
        scaled = adjusted / torch.where(temperature > 0, temperature, 1.0)
        if needs.truncation:
            scaled = truncated(scaled, settings.limits(rows))
        drawn = _draw(scaled, uniform(settings.seed[rows], positions))
        tokens = torch.where(temperature[:, 0] > 0, drawn, tokens)
    result = Sampled(tokens, finite)
    if needs.top_logprobs is not None:
        logprobs = logits.log_softmax(-1)
        result.logprob = logprobs.gather(1, tokens[:, None])[:, 0]
        if needs.top_logprobs:
            result.top_logprob, result.top_id = logprobs.topk(needs.top_logprobs, dim=-1)
    return result


def _penalise_repetition(logits: torch.Tensor, settings: SamplerRows, rows: slice | torch.Tensor) -> torch.Tensor:
    """Apply the repetition penalty to the tokens of prompt and answer (CTRL, section 4.1)."""
    assert settings.occurred is not None
    penalty = settings.column("repetition_penalty", rows)
    return torch.where(settings.occurred[rows], torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def _penalise_counts(logits: torch.Tensor, settings: SamplerRows, rows: slice | torch.Tensor) -> torch.Tensor:
    """Apply the frequency and presence penalties to the tokens of the answer (OpenAI)."""
    assert settings.generated is not None
    counts = settings.generated[rows]
    logits = logits - settings.column("frequency_penalty", rows) * counts
    return logits - settings.column("presence_penalty", rows) * (counts > 0)


def _draw(scaled: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Invert the cumulative distribution, in the order of the vocabulary. uniforms: (rows,) in [0, 1)."""
    cumulative = scaled.softmax(-1, dtype=torch.float64).cumsum(-1)
    target = uniforms[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True)[:, 0].clamp(max=scaled.shape[-1] - 1)


def answer_seed(seed: int, index: int) -> int:
    """Return the seed, as int64, of answer `index` of a request.

    The factor differs from that of positions in `uniform`; otherwise the answers would draw the same numbers a few tokens
    apart.
    """
    return (seed + index * 0xD1B54A32D192ED03 + 2**63) % 2**64 - 2**63


def uniform(seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Return (rows,) float64 in [0, 1), a SplitMix64 hash of seed and position (Steele, Lea and Flood 2014)."""
    x = seed + (position + 1) * -7046029254386353131
    x = (x ^ _shift(x, 30)) * -4658895280553007687
    x = (x ^ _shift(x, 27)) * -7723592293110705685
    x = x ^ _shift(x, 31)
    return _shift(x, 11).double() * 2.0**-53


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift int64 right logically."""
    return (x >> bits) & (2 ** (64 - bits) - 1)
