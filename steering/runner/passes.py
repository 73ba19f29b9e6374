"""Forward passes under hooks, by a backend where it supports them, otherwise eagerly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from steering.accel.backend import Backend, FastPasses, RunnerState
from steering.accel.kernel import decode_kernel_of
from steering.decoder.attention import AttentionStep, Decode
from steering.decoder.candidates import Candidates
from steering.decoder.hooks import Hook, Hooks
from steering.decoder.kv import KVPool
from steering.decoder.prompts import Prefill, Ragged
from steering.devices import to_device
from steering.model.embedded import Embedded
from steering.model.mllm import MLLM
from steering.protocol.sequence import Sequence
from steering.protocol.slots import Computed, DecodeBatch, HookPlan, HookPlans, PrefillChunk, Slots
from steering.runner.columns import Columns, columns_of
from steering.runner.embedding import Embedder

HooksByName = Mapping[str, Hook | None]
"""Hooks by the names of their slots."""


class Passed(NamedTuple):
    """The results of a pass, before they are kept."""

    plan: HookPlan
    hooks: HooksByName
    computed: Computed

    def prepare_logits(self, batch: PrefillChunk | DecodeBatch) -> None:
        """Let everything that acts write what its `logits` needs of this pass."""
        for part in self.plan.acting:
            part.prepare_logits(batch, self.hooks.get(part.name), self.computed)


class Passes:
    """Runs forward passes through the decoder, and writes nothing but the columns of their tokens."""

    def __init__(self, mllm: MLLM, pool: KVPool, hook_plans: HookPlans, embedder: Embedder):
        self._mllm, self._pool, self._hook_plans, self._embedder = mllm, pool, hook_plans, embedder
        self._fast: FastPasses | None = None
        self._weights = sum(parameter.nbytes for parameter in mllm.decoder.parameters())
        self._always = torch.ones(pool.slots, 1, 1, device=mllm.device)

    def use(self, backend: Backend | None) -> None:
        """Use a backend for each pass from now on; None for none."""
        state = RunnerState(self._pool, self._hook_plans.every, self.prompts_under)
        self._fast = None if backend is None else backend.on(state)
        self._embedder.use(backend)

    def apart(self, chunk: PrefillChunk) -> bool:
        """Return True where the prompts of a chunk run faster one after the other than together."""
        return self._fast is not None and self._fast.apart(chunk, self._hook_plans.of(chunk.sequences).acting)

    def prompts(self, chunk: PrefillChunk, inputs: Embedded) -> Passed:
        """Run a chunk of some prompts, with these decoder inputs."""
        plan = self._hook_plans.of(chunk.sequences)
        if self._fast is not None:
            ran = self._fast.prompts(chunk, plan.acting, inputs, self._embedder.rope_axes)
            if ran is not None:
                return Passed(plan, *ran)
        hooks = {part.name: part.prefill(chunk) for part in plan.acting}
        return Passed(plan, hooks, self.prompts_under(hooks, chunk, inputs))

    def prompts_under(self, hooks: HooksByName, chunk: PrefillChunk, inputs: Embedded) -> Computed:
        """Run a chunk of some prompts eagerly under these hooks."""
        arguments = inputs.arguments
        if inputs.divisible or any(chunk.starts):
            arguments["attention_mask"] = self._placeholder_mask(1)
        return self._prefill(
            hooks, chunk, lambda step: self._mllm.decoder(**arguments, use_cache=False, step=step), inputs.divisible
        )

    def generated(self, chunk: PrefillChunk, tokens: torch.Tensor, positions: torch.Tensor) -> Passed:
        """Run generated tokens (1, n) at rotary positions (1, n) as a chunk of a prompt."""
        plan = self._hook_plans.of(chunk.sequences)
        hooks = {part.name: part.prefill(chunk) for part in plan.acting}
        computed = self._prefill(hooks, chunk, lambda step: self._decode_tokens(tokens, positions, step))
        return Passed(plan, hooks, computed)

    def decode(
        self, running: list[Sequence], tokens: torch.Tensor, positions: torch.Tensor, rope: torch.Tensor
    ) -> tuple[DecodeBatch, Passed]:
        """Decode one token of every running sequence, (rows,), at these columns and rotary positions."""
        batch, columns = self.batch(running, positions)
        plan = self._hook_plans.of(running)
        acting = [part for part in plan.acting if part.acts(running)]
        # Rows of very different lengths are read apart, except by a kernel, which reads only each row's own columns.
        apart = columns.saved > self._weights and self._mllm.decode_attention is None
        if self._fast is not None and not apart:
            ran = self._fast.decode(batch, acting, tokens, rope, self._embedder.rope_axes)
            if ran is not None:
                return batch, Passed(plan, *ran)
        hooks = {part.name: part.decode(batch) for part in acting}
        return batch, Passed(plan, hooks, self.decode_under(hooks, batch, columns, tokens, rope))

    def behind_prompt(
        self, chunk: PrefillChunk, others: list[Slots], own: HooksByName, token: torch.Tensor, rope: torch.Tensor
    ) -> None:
        """Run a token (1,) as the chunk behind a prompt; what it writes to the pool is overwritten by the next decode.

        It is run under the hooks of `others` and of `own`. rope: (1,), its rotary position.
        """
        hooks = {part.name: part.prefill(chunk) for part in others} | dict(own)
        self._prefill(hooks, chunk, lambda step: self._decode_tokens(token[None], rope[None], step), kept=False)

    def behind(
        self, batch: DecodeBatch, others: list[Slots], own: HooksByName, tokens: torch.Tensor, rope: torch.Tensor
    ) -> None:
        """Run a token of every row, (rows,), behind a batch's; what it writes to the pool is overwritten by the next decode.

        They are run under the hooks of `others` and of `own`. rope: (rows,), rotary positions.
        """
        last = self._pool.length - 1  # of a row whose answer has ended, this may be its own column
        lengths = [min(sequence.length + 2, last + 1) for sequence in batch.sequences]
        columns = columns_of(lengths, self._pool, self._mllm.device.type)
        behind = replace(batch, positions=(batch.positions + 1).clamp(max=last), columns=columns.longest)
        hooks = {part.name: part.decode(behind) for part in others if part.acts(behind.sequences)} | dict(own)
        self.decode_under(hooks, behind, columns, tokens, rope, kept=False)

    def candidates(
        self,
        sequences: list[Sequence],
        slots: torch.Tensor,
        positions: torch.Tensor,
        tokens: torch.Tensor,
        rope_delta: torch.Tensor,
        hook: Hook,
    ) -> None:
        """Run tokens (n, each) behind some slots in one pass, each as if it were the next one; nothing is written.

        slots, positions, rope_delta: (n,). positions: the columns that the tokens would have. hook: of n * each rows.
        """
        last = self._pool.length - 1  # of an answer that has ended, this may be its own column
        lengths = [min(sequence.length + 2, last + 1) for sequence in sequences]
        columns, each = columns_of(lengths, self._pool, slots.device.type).longest, tokens.shape[1]
        step = Candidates(self._pool, slots, positions.clamp(max=last), each, columns, Hooks.of([hook]))
        rope = (positions + rope_delta).repeat_interleave(each)
        self._decode_tokens(tokens.reshape(-1, 1), rope[:, None], step)
        step.hooks.settle(step.positions)

    def batch(self, running: list[Sequence], positions: torch.Tensor) -> tuple[DecodeBatch, Columns]:
        """Return a decode batch of running sequences that writes these columns, and the columns that it reads."""
        columns = columns_of([sequence.length + 1 for sequence in running], self._pool, self._mllm.device.type)
        # A held row only keeps its place while its twin is in prefill; its result is overwritten later.
        active = self._always[: len(running)]
        if any(sequence.held for sequence in running):
            rows = [[[float(not sequence.held)]] for sequence in running]
            active = to_device(torch.tensor(rows), positions.device)
        return DecodeBatch(running, positions, columns.longest, active), columns

    def decode_under(
        self,
        hooks: HooksByName,
        batch: DecodeBatch,
        columns: Columns,
        tokens: torch.Tensor,
        rope: torch.Tensor,
        kept: bool = True,
    ) -> Computed:
        """Run a decode eagerly under these hooks; kept: False for tokens that are only tried."""
        kernel, hooks_of_kernel = decode_kernel_of(self._mllm), Hooks.of(hooks.values())
        if kernel is not None:
            hooks_of_kernel = kernel.adopted(hooks_of_kernel)
        reads = (batch.columns, hooks_of_kernel, columns.common, columns.apart)
        step = Decode(self._pool, batch.positions, *reads, kernel=kernel, kept=kept)
        hidden = self._decode_tokens(tokens[:, None], rope[:, None], step).last_hidden_state
        step.hooks.settle(batch.positions)
        hidden = hidden.to(self._mllm.device)
        return Computed(hidden, self._mllm.head(hidden[:, -1]))

    def _prefill(
        self,
        hooks: HooksByName,
        chunk: PrefillChunk,
        decoder: Callable[[Prefill], Any],
        causal: bool = True,
        kept: bool = True,
    ) -> Computed:
        """Run a prefill eagerly; causal: a token attends to those before it alone. kept: False for tokens only tried."""
        ragged = Ragged(chunk.starts, chunk.lengths) if len(set(chunk.starts)) > 1 else None
        step = Prefill(self._pool, chunk.rows, chunk.starts[0], Hooks.of(hooks.values()), ragged)
        step.lengths, step.wanted, step.kept = chunk.lengths, chunk.wanted if kept else (), kept
        if causal and self._fast is not None:
            step.kernel = self._fast.prompt_kernel()
        hidden: torch.Tensor = decoder(step).last_hidden_state.to(self._mllm.device)
        step.hooks.settle(None)
        for (row, length), states in step.recurrent.taken.items() if self._pool.states else ():
            chunk.sequences[row].prefill.states[chunk.starts[row] + length] = states
        return Computed(hidden, self._mllm.head_at(hidden, chunk.last) if chunk.complete else None)

    def _decode_tokens(self, tokens: torch.Tensor, positions: torch.Tensor, step: AttentionStep) -> Any:
        """Run the decoder on generated tokens (rows, n) at rotary positions (rows, n)."""
        if (axes := self._embedder.rope_axes) is not None:
            positions = positions.expand(axes, -1, -1)
        return self._mllm.decoder(
            **self._mllm.token_inputs(tokens),
            position_ids=positions,
            attention_mask=self._placeholder_mask(len(tokens)),
            use_cache=False,
            step=step,
        )

    def _placeholder_mask(self, rows: int) -> torch.Tensor:
        """Return a placeholder mask that keeps the model from building one; our attention makes its own."""
        return torch.ones(rows, 1, 1, 1, dtype=torch.bool, device=self._mllm.device)
