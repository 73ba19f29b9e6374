"""Forward passes under their hooks: by a compiled step where there is one for them, and else as the model is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from steering.accel.cpu.kernels.prompts import PromptLoops
from steering.accel.cpu.steps import CompiledSteps
from steering.accel.cuda_graphs import DecodeGraphs
from steering.accel.tensors import Bound
from steering.decoder.attention import Decode
from steering.decoder.hooks import Hook, Hooks
from steering.decoder.kv import KVPool
from steering.decoder.prompts import Prefill, Ragged
from steering.devices import sent
from steering.model.embedded import Embedded
from steering.model.mllm import MLLM
from steering.protocol.sequence import Sequence
from steering.protocol.slots import (
    SCOPES,
    Compiled,
    Computed,
    Concerned,
    Concerns,
    DecodeBatch,
    PrefillChunk,
    Scope,
    Slots,
)
from steering.runner.columns import columns_of
from steering.runner.embedding import Embedder

Made = dict[str, Hook | None]
"""Hooks by the names of the slots that they are of."""


class Passed(NamedTuple):
    """What a pass computed, and nobody has kept yet."""

    concerned: Concerned
    hooks: Made
    computed: Computed


class Passes:
    """Runs what it is given through the decoder, and writes nothing but the columns of these tokens. steps: those that are
    compiled, or captured."""

    def __init__(
        self,
        mllm: MLLM,
        pool: KVPool,
        concerns: Concerns,
        embedder: Embedder,
        steps: CompiledSteps | DecodeGraphs | None,
    ):
        self.steps = steps
        self._mllm, self._pool, self._concerns, self._embedder = mllm, pool, concerns, embedder
        self._weights = sum(one.nbytes for one in mllm.decoder.parameters())
        self._known: dict[tuple[tuple[str, ...], int], tuple[Made, Bound]] = {}
        self._always = torch.ones(pool.slots, 1, 1, device=mllm.device)

    def prompts(self, chunk: PrefillChunk, inputs: Embedded, scope: Scope | None = None) -> Passed:
        """A part of some prompts, of which these are the decoder's inputs. scope: as of a decode."""
        concerned = self._concerned(chunk.sequences, scope)
        acting = [part for part in concerned.acting if part.acts_on_prompts(chunk.sequences)]
        needed: list[Compiled] = [part.compiled_of(chunk.sequences) for part in acting]
        if scope is not None:
            needed = [scope]
        if (found := self._prompts_compiled(chunk, inputs, needed)) is not None:
            return Passed(concerned, *found)
        arguments = inputs.arguments
        if any(chunk.starts):
            arguments["attention_mask"] = self._own_mask(1)
        return self._prefill(
            chunk, concerned, lambda step: self._mllm.decoder(**arguments, use_cache=False, step=step), inputs.divisible
        )

    def generated(self, chunk: PrefillChunk, tokens: torch.Tensor, positions: torch.Tensor) -> Passed:
        """Tokens (1, n) of an answer at rotary positions (1, n), as a chunk of a prompt."""
        concerned = self._concerned(chunk.sequences, None)
        return self._prefill(chunk, concerned, lambda step: self._of_tokens(tokens, positions, step))

    def decode(
        self,
        running: list[Sequence],
        tokens: torch.Tensor,
        positions: torch.Tensor,
        rope: torch.Tensor,
        scope: Scope | None = None,
    ) -> tuple[DecodeBatch, Passed]:
        """One token of every running sequence, (rows,), at these columns and rotary positions; within a `scope` under all
        hooks that a compiled step for that has, and not under those of what was asked for."""
        columns = columns_of([sequence.length + 1 for sequence in running], self._pool, self._mllm.device.type)
        longest = columns.longest if self.steps is None else self.steps.columns(columns.longest, self._pool)
        # A row that is held only keeps its place: its twin is still in prefill, and what it does now is written over.
        active = self._always[: len(running)]
        if any(sequence.held for sequence in running):
            kept = [[[float(not sequence.held)]] for sequence in running]
            active = sent(torch.tensor(kept), positions.device)
        batch = DecodeBatch(running, positions, longest, active, scope not in (None, "plain"))
        concerned = self._concerned(running, scope)
        acting = [part for part in concerned.acting if scope is not None or part.acts(running)]
        kernel = self._mllm.decode_attention  # which reads of each row what that has
        long = kernel is None and columns.saved > self._weights  # rows of very different lengths are read by themselves
        if not long and (found := self._decode_compiled(batch, acting, tokens, rope)) is not None:
            return batch, Passed(concerned, *found)
        hooks = {part.name: part.decode(batch) for part in acting}
        own = Hooks.of(hooks.values())
        step = Decode(self._pool, positions, longest, own, columns.common, columns.apart, kernel=kernel)
        hidden = self._of_tokens(tokens[:, None], rope[:, None], step).last_hidden_state
        step.hooks.settle(positions)
        hidden = hidden.to(self._mllm.device)
        return batch, Passed(concerned, hooks, Computed(hidden, self._mllm.head(hidden[:, -1])))

    def _concerned(self, sequences: list[Sequence], scope: Scope | None) -> Concerned:
        if scope is None:
            return self._concerns.of(sequences)
        parts = self._concerns.of_steps[scope]
        return Concerned(parts, parts)

    def _decode_compiled(
        self, batch: DecodeBatch, acting: list[Slots], tokens: torch.Tensor, rope: torch.Tensor
    ) -> tuple[Made, Computed] | None:
        """A decode by a compiled step; None where there is none for what acts."""
        for parts, uniform in self._of_decode(acting):
            hooks, bound = self._bound(batch, parts, uniform)
            fed = self._embedder.rope_axes, tokens, batch.positions, rope, batch.columns, self._pool
            if self.steps is not None and (computed := self.steps.decode(bound, *fed)) is not None:
                return hooks, computed
        return None

    def _of_decode(self, acting: list[Slots]) -> Iterable[tuple[list[Slots], bool]]:
        """The parts whose hooks decode steps have that may be there, and whether those are uniform. One that is captured has
        those that act, and no others: a GPU waits for each that is neutral."""
        needed = [part.compiled for part in acting]
        if not isinstance(self.steps, DecodeGraphs):
            return ((self._concerns.of_steps[scope], scope != "plain") for scope in self._scopes("decode", needed))
        return [] if "never" in needed else [(acting, any(one != "plain" for one in needed))]

    def _bound(self, batch: DecodeBatch, parts: list[Slots], uniform: bool) -> tuple[Made, Bound]:
        """The hooks of a compiled decode. Where all rows are active they are made once, as a step is short: they hold views
        of tensors that are there as long as their slots."""
        place = tuple(part.name for part in parts), len(batch.sequences)
        steady = not any(sequence.held for sequence in batch.sequences)
        if steady and place in self._known:
            return self._known[place]
        one = replace(batch, uniform=uniform)
        hooks = {part.name: part.decode(one) for part in parts}
        found = hooks, _bound_of(hooks)
        if steady:
            self._known[place] = found
        return found

    def _prompts_compiled(
        self, chunk: PrefillChunk, inputs: Embedded, needed: list[Compiled]
    ) -> tuple[Made, Computed] | None:
        """The same for a part of some prompts."""
        if self.steps is None or not inputs.plain or not self.steps.may_run(chunk, self._pool):
            return None
        for scope in self._scopes("prefill", needed):
            if not chunk.complete and scope != "plain":
                continue
            one = replace(chunk, uniform=scope != "plain")
            hooks = {part.name: part.prefill(one) for part in self._concerns.of_steps[scope]}
            fed = self._embedder.rope_axes, inputs.embeds, inputs.positions, one, self._pool
            if (computed := self.steps.prefill(_bound_of(hooks), *fed)) is not None:
                return hooks, computed
        return None

    def _scopes(self, kind: str, needed: list[Compiled]) -> list[Scope]:
        """The scopes of compiled steps that have the hooks of all that acts, the smallest first. needed: by each."""
        if not isinstance(self.steps, CompiledSteps) or "never" in needed:
            return []
        least = max((SCOPES.index(one) for one in needed if one != "never"), default=0)
        ready = self.steps.scopes.get(kind, frozenset())
        return [scope for scope in SCOPES[least:] if scope in ready]

    def _prefill(
        self, chunk: PrefillChunk, concerned: Concerned, decoder: Callable[[Prefill], Any], causal: bool = True
    ) -> Passed:
        """causal: a token sees those before it alone."""
        hooks = {part.name: part.prefill(chunk) for part in concerned.acting}
        ragged = Ragged(chunk.starts, chunk.lengths) if len(set(chunk.starts)) > 1 else None
        step = Prefill(self._pool, chunk.rows, chunk.starts[0], Hooks.of(hooks.values()), ragged)
        loops = self.steps.loops if self.steps is not None else None
        if causal and loops is not None and loops.threads >= torch.get_num_threads():
            step.loops = PromptLoops.of(loops)
        hidden: torch.Tensor = decoder(step).last_hidden_state.to(self._mllm.device)
        step.hooks.settle(None)
        logits = None
        if chunk.complete:
            last = sent(chunk.last, hidden.device)
            logits = self._mllm.head(hidden[torch.arange(len(last), device=last.device), last])
        return Passed(concerned, hooks, Computed(hidden, logits))

    def _of_tokens(self, tokens: torch.Tensor, positions: torch.Tensor, step: Prefill | Decode) -> Any:
        """The decoder's output of generated tokens (rows, n) at rotary positions (rows, n)."""
        if (axes := self._embedder.rope_axes) is not None:
            positions = positions.expand(axes, -1, -1)
        return self._mllm.decoder(
            inputs_embeds=self._mllm.model.get_input_embeddings()(tokens),
            position_ids=positions,
            attention_mask=self._own_mask(len(tokens)),
            use_cache=False,
            step=step,
        )

    def _own_mask(self, rows: int) -> torch.Tensor:
        """Stands for a mask that our attention makes itself; it keeps the model from building one."""
        return torch.ones(rows, 1, 1, 1, dtype=torch.bool, device=self._mllm.device)


def _bound_of(hooks: Made) -> Bound:
    return Bound([hook for hook in hooks.values() if hook is not None])
