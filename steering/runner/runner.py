"""The runner: prefill of new prompts and one decode step for every running sequence, tensors in, tokens out."""

from __future__ import annotations

import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import torch

from steering.accel.backend import Backend
from steering.decoder.hooks import Hook
from steering.devices import fill_slot, to_device
from steering.model.embedded import Embedded
from steering.model.images import ImageCache
from steering.model.mllm import MLLM
from steering.protocol import intervention, recorder
from steering.protocol.sequence import Sequence
from steering.protocol.slots import Computed, DecodeBatch, HookPlans, LookAhead, Pool, PrefillChunk, Slots
from steering.runner.choice import Chooser
from steering.runner.contrastive import Combined, ContrastiveBranches, ContrastSlots, replayed, rows_of
from steering.runner.embedding import Embedder
from steering.runner.passes import Passed, Passes
from steering.runner.prefix import PrefixCache
from steering.runner.room import SHARE, allotted, pass_bytes
from steering.runner.sampler import Sampled
from steering.runner.threads import PassThreads


class Decoded(NamedTuple):
    """The results of a decode.

    logits: (rows, vocabulary) before any contrast, masked by grammars. spoilt: sequences whose measurements could not be
    kept, and why.
    """

    sampled: Sampled
    logits: torch.Tensor
    spoilt: dict[Sequence, Exception]


class Runner:
    """Owns every tensor with a slot dimension: keys and values, tokens, and the slots of all interventions and recorders."""

    @torch.inference_mode()  # its tensors must all be inference tensors
    def __init__(
        self,
        mllm: MLLM,
        slots: int,
        length: int,
        max_images: int,
        image_cache_bytes: int = 0,
        prefix_cache_bytes: int = 0,
        share: float = SHARE,
        backend: Backend | None = None,
        pass_tokens: int = 0,
    ):
        """Allocate the slots, beside caches and a prefill of `pass_tokens`; use `backend` for each pass that it supports."""
        self.mllm = mllm
        self.threads = PassThreads(mllm)
        self.image_cache = ImageCache(image_cache_bytes)
        mllm.seen.capacity = image_cache_bytes
        reserved = image_cache_bytes + prefix_cache_bytes + pass_bytes(mllm, pass_tokens)
        # The kernel, too, takes a row that writes to the last column for padding; candidates of the last token would.
        spare = mllm.decode_attention is not None or (backend is not None and backend.spare_column)
        self.pool = allotted(mllm, slots, length, spare, share, reserved)
        slots, length = self.pool.slots, self.pool.length
        self.choice = Chooser(mllm, slots)
        self.token = torch.zeros(slots, dtype=torch.int64, device=mllm.device)
        self.position = torch.zeros(slots, dtype=torch.int64, device=mllm.device)
        self.rope_delta = torch.zeros(slots, dtype=torch.int64, device=mllm.device)
        size = Pool(mllm, slots, length, max_images)
        interventions = {name: kind for name, (_, kind) in intervention.REGISTRY.items() if kind is not None}
        self.changes = ContrastSlots("twins", size)
        self.recorders = {name: kind(name, size) for name, kind in recorder.REGISTRY.items()}
        self.interventions = {name: kind(name, size) for name, kind in interventions.items()}
        self._occupied: defaultdict[str, set[int]] = defaultdict(set)  # by part, the slots that are not neutral
        self.hook_plans = HookPlans(self.recorders, self.interventions)
        self.prefixes = PrefixCache(self.pool, self.hook_plans, prefix_cache_bytes if mllm.rotates_alike else 0)
        self.embedder = Embedder(mllm, self.image_cache, self.prefixes)
        self.passes = Passes(mllm, self.pool, self.hook_plans, self.embedder)
        self.passes.use(backend)

    @property
    def _parts(self) -> tuple[Slots, ...]:
        return (*self.recorders.values(), *self.interventions.values(), self.changes)

    def stats(self) -> dict[str, int]:
        """Return the bytes of all slots, and the counters of all caches.

        The bytes are those of keys and values, which a CPU allocates at the first prompt, with the number of tokens that
        fit, and those of all other state.
        """
        parts = [part for slots in self._parts for part in vars(slots).values()]
        state = sum(part.nbytes for part in parts if isinstance(part, torch.Tensor))
        kv = {"kv_bytes": self.pool.bytes, "kv_max_tokens": self.pool.slots * self.pool.length}
        caches = {**self.image_cache.stats(), **self.mllm.seen.stats(), **self.prefixes.stats()}
        return {**kv, "state_bytes": state + self.pool.states.bytes, **caches}

    @torch.inference_mode()
    def embed(self, sequences: Iterable[Sequence]) -> None:
        """Compute the decoder's inputs of prompts that have none yet."""
        self.embedder.embed(sequences)

    @torch.inference_mode()
    def prefill(self, sequences: list[Sequence], budget: int) -> torch.Tensor | None:
        """Prefill several prompts whole, or the next chunk of a single long one or of its replay, except cached prefixes.

        Returns the last logits (rows, vocabulary), or None while a prompt is not complete.
        """
        if sequences[0].computed >= sequences[0].prompt.length:
            return self._feed(*replayed(sequences[0], budget))
        self.embed(sequences)
        for sequence in sequences:
            if not sequence.computed and sequence.prefill.embedded is not None:
                self._place(sequence)
                self.prefixes.begin(sequence, sequence.prefill.embedded)
                if (
                    sequence.computed < sequence.prefill.unseen
                ):  # its prefix was cached when it was embedded, and is no longer
                    sequence.prefill.embedded = None
                    self.embedder.embed([sequence], whole=True)
        prompts = [sequence.prefill.embedded for sequence in sequences if sequence.prefill.embedded is not None]
        starts, ends = [sequence.computed for sequence in sequences], [prompt.length for prompt in prompts]
        if len(prompts) == 1 and prompts[0].divisible:
            ends = [min(ends[0], starts[0] + budget)]
        parts = [prompt.cut(*part) for prompt, *part in zip(prompts, starts, ends, strict=True)]
        lengths = [end - start for start, end in zip(starts, ends, strict=True)]
        chunk = PrefillChunk(sequences, starts, lengths, complete=ends[0] == prompts[0].length)
        logits = self._run_chunk(chunk, parts)
        for sequence, length in zip(sequences, lengths, strict=True):
            sequence.computed += length
        if logits is None:
            return None
        for row, sequence in enumerate(sequences):
            sequence.prefill.embedded = None
            if sequence.prefill.expects_forks:
                sequence.prefill.left = {part.name: part.left(sequence) for part in self._parts}
                sequence.prefill.left_states = self.pool.states.taken(sequence.slot, sequence.prompt.length)
                sequence.prefill.logits = logits[row]
        return None if sequences[0].prefill.replay else logits

    def _run_chunk(self, chunk: PrefillChunk, parts: list[Embedded]) -> torch.Tensor | None:
        """Run a chunk of some prompts, with the decoder inputs of each; return their last logits, None without."""
        if len(parts) > 1 and self.passes.apart(chunk):
            alone = [self._run_chunk(single, [part]) for single, part in zip(chunk.singles, parts, strict=True)]
            return torch.cat([logits for logits in alone if logits is not None])
        inputs = parts[0] if len(parts) == 1 else Embedded.join(parts)
        with self.threads.taken(len(chunk.sequences) * chunk.width):
            return self._keep(chunk, self.passes.prompts(chunk, inputs)).logits

    def _keep(self, chunk: PrefillChunk, passed: Passed) -> Computed:
        """Keep the measurements of a chunk."""
        self.prefixes.measured(chunk, passed.hooks, passed.computed)
        if chunk.complete:
            passed.prepare_logits(chunk)
        for part in passed.plan.keeping:
            part.keep(chunk, passed.hooks.get(part.name), passed.computed)
        return passed.computed

    def _feed(self, chunk: PrefillChunk, generated: tuple[int, ...]) -> torch.Tensor | None:
        """Feed a sequence tokens of its answer, many at once.

        Returns the last logits (1, vocabulary), or None while there is more.
        """
        (sequence,) = chunk.sequences
        tokens = to_device(torch.tensor(generated), self.mllm.device)
        positions = torch.arange(len(tokens), device=tokens.device) + chunk.starts[0] + sequence.prefill.rope_delta
        computed = self._keep(chunk, self.passes.generated(chunk, tokens[None], positions[None]))
        sequence.computed += len(tokens)
        return computed.logits

    @torch.inference_mode()
    def fork(self, sequences: list[Sequence]) -> torch.Tensor:
        """Start sequences whose prompt another one already has in its slot; return the last logits (rows, vocabulary)."""
        logits = []
        for sequence in sequences:
            source = sequence.prefill.fork_of
            assert source is not None
            assert source.prefill.left is not None
            assert source.prefill.logits is not None
            sequence.prefill.rope_delta = source.prefill.rope_delta
            self._place(sequence)
            self._copy(source.slot, sequence.slot, source.prompt.length)
            self.pool.states.put(sequence.slot, source.prompt.length, source.prefill.left_states)
            for part in self._parts:
                part.restore(sequence, source.prefill.left[part.name])
            sequence.computed = source.prompt.length
            if sequence.pair is not None and source.pair is not None and sequence.is_leader:
                sequence.pair.made = source.pair.made[:1]
            logits.append(source.prefill.logits)
        return torch.stack(logits)

    @torch.inference_mode()
    def next_tokens(self, sequences: list[Sequence], logits: torch.Tensor) -> Sampled:
        """Sample outside of a decode: the first token, or the one that ends a wait. logits: (rows, vocabulary)."""
        for sequence in rows_of(sequences):
            fill_slot(self.position, sequence.slot, sequence.computed + len(sequence.tokens))
        for sequence in sequences:
            if sequence.held:  # meanwhile its row counted tokens that do not exist
                self.choice.place(sequence)
        logits = self.choice.masked(sequences, logits)
        plan = self.hook_plans.of(sequences)
        if plan.looking:
            self._look_behind_prompts(sequences, logits)
        rows = to_device(torch.tensor([sequence.slot for sequence in sequences]), logits.device)
        sampled = self.choice.sampled(sequences, plan.acting, rows, lambda: self.position[rows], logits)
        self.token[rows] = sampled.tokens
        for row, sequence in enumerate(sequences):
            if sequence.twin is not None:
                self.token[sequence.twin.slot] = sampled.tokens[row]
        return sampled

    @torch.inference_mode()
    def decode(
        self,
        running: list[Sequence],
        branches: ContrastiveBranches,
        meanwhile: Callable[[], bool] = lambda: True,
    ) -> Decoded | None:
        """Decode one token for every running sequence; row i is slot i.

        `meanwhile` is called once the forward pass is launched, and returns True where its result is wanted. State that
        later steps depend on changes only at the end, so that a step that raised may be run again. After that point it may
        not: an error there spoils the sequences that it concerns.
        """
        with self.threads.taken(len(running)):
            batch, passed = self._decode(running)
            return self._sample_decoded(running, branches, batch, passed) if meanwhile() else None

    def _sample_decoded(
        self, running: list[Sequence], branches: ContrastiveBranches, batch: DecodeBatch, passed: Passed
    ) -> Decoded:
        logits = passed.computed.logits
        assert logits is not None
        passed.prepare_logits(batch)
        logits = self.choice.masked(running, logits)
        combined: Combined = branches.combine(running, logits)
        rows, acting = batch.rows, passed.plan.acting
        for part in passed.plan.looking:
            run = partial(self._run_behind, batch, acting, part)
            together = partial(self._run_together, running, batch.positions, part)
            hook = passed.hooks.get(part.name)
            part.look_ahead(LookAhead(running, rows, batch.positions, hook, combined.logits, run, together))
        sampled = self.choice.sampled(running, acting, rows, lambda: batch.positions + 1, combined.logits)
        spoilt = self._record(batch, passed)
        try:
            branches.record(combined)
        except Exception as error:
            spoilt |= dict.fromkeys((sequence for sequence in running if sequence.pair is not None), error)
        self.token[rows] = sampled.tokens
        if combined.leaders is not None and combined.twins is not None:
            self.token[combined.twins] = sampled.tokens[combined.leaders]
        return Decoded(sampled, logits, spoilt)

    def _look_behind_prompts(self, sequences: list[Sequence], logits: torch.Tensor) -> None:
        """Let interventions look ahead at the first tokens of answers. logits: (rows, vocabulary)."""
        for row, sequence in enumerate(sequences):
            plan = self.hook_plans.of([sequence])
            if sequence.sampled or not plan.looking:
                continue
            chunk = PrefillChunk([sequence], [sequence.computed], [1], complete=False, replay=True)
            last = to_device(torch.tensor([sequence.computed - 1]), logits.device)
            for part in plan.looking:
                run = partial(self._run_behind_prompt, chunk, plan.acting, part)
                together = partial(self._run_together, [sequence], last, part)
                part.look_ahead(LookAhead([sequence], chunk.rows, last, None, logits[row : row + 1], run, together))

    def _run_behind_prompt(
        self, chunk: PrefillChunk, acting: list[Slots], own: Slots, token: torch.Tensor, hook: Hook
    ) -> None:
        """Run a token (1,) behind a prompt, under a hook of `own` and those of the other interventions."""
        rope = torch.full_like(token, chunk.starts[0]) + chunk.sequences[0].prefill.rope_delta
        self.passes.behind_prompt(chunk, self._others(acting, own), {own.name: hook}, token, rope)

    def _run_behind(
        self, batch: DecodeBatch, acting: list[Slots], own: Slots, tokens: torch.Tensor, hook: Hook
    ) -> None:
        """Run a token of every row behind a batch's, under a hook of `own` and those of the other interventions."""
        rope = batch.positions + 1 + self.rope_delta[: len(batch.sequences)]
        self.passes.behind(batch, self._others(acting, own), {own.name: hook}, tokens, rope)

    def _run_together(
        self,
        sequences: list[Sequence],
        positions: torch.Tensor,
        own: Slots,
        rows: list[int],
        tokens: torch.Tensor,
        hook: Hook,
    ) -> bool:
        """Run tokens (some, n) behind some rows in one pass, where no other intervention acts in these.

        positions: (rows,), the columns of the rows' last tokens.
        """
        trying = [sequences[row] for row in rows]
        if any(part is not own and part.holds(sequence) for part in self.interventions.values() for sequence in trying):
            return False
        places = to_device(torch.tensor([[row, sequences[row].slot] for row in rows]), positions.device)
        at, slots = places.unbind(1)
        self.passes.candidates(trying, slots, positions[at] + 1, tokens, self.rope_delta[slots], hook)
        return True

    def _others(self, acting: list[Slots], own: Slots) -> list[Slots]:
        return [part for part in acting if part is not own and part.name in self.interventions]

    @torch.inference_mode()
    def decode_logits(self, running: list[Sequence]) -> torch.Tensor:
        """Feed every running sequence's last token; return (rows, vocabulary), and keep the captures that sequences want."""
        batch, passed = self._decode(running)
        for error in self._record(batch, passed).values():
            raise error
        assert passed.computed.logits is not None
        return passed.computed.logits

    def blamed(self, error: Exception, running: list[Sequence]) -> list[Sequence]:
        """Return the sequences whose intervention or recorder raised in a decode of `running`; all where none did."""
        owners = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
        modules = {
            kind.__module__ for owner in owners if isinstance(owner, Slots | Hook) for kind in type(owner).__mro__
        }
        parts = [part for part in self._parts if type(part).__module__ in modules]
        return [sequence for sequence in running if any(_concerns(part, sequence) for part in parts)] or running

    def _decode(self, running: list[Sequence]) -> tuple[DecodeBatch, Passed]:
        """Feed every running sequence's last token; write nothing but that token's columns of the pool."""
        count = len(running)
        positions = self.position[:count].clone()
        rope = positions + self.rope_delta[:count]
        return self.passes.decode(running, self.token[:count], positions, rope)

    def _record(self, batch: DecodeBatch, passed: Passed) -> dict[Sequence, Exception]:
        """Keep the results of a decode; return the sequences whose measurements could not be kept, and why."""
        spoilt: dict[Sequence, Exception] = {}
        for part in passed.plan.keeping:
            try:
                part.record(batch, passed.hooks.get(part.name), passed.computed)
            except Exception as error:
                spoilt |= dict.fromkeys((sequence for sequence in batch.sequences if _concerns(part, sequence)), error)
        self.position[batch.rows].add_(batch.active.flatten().long())  # += would copy the view onto itself
        return spoilt

    @torch.inference_mode()
    def move(self, source: int, target: int, length: int) -> None:
        """Move a sequence with `length` used columns to another slot."""
        self._copy(source, target, length)
        self.pool.states.move(source, target)
        for tensor in (self.token, self.position, self.rope_delta):
            tensor[target] = tensor[source]
        self.choice.move(source, target)
        for part in self._parts:
            slots = self._occupied[part.name]
            if source in slots or target in slots:
                part.move(source, target)
                (slots.add if source in slots else slots.discard)(target)

    @torch.inference_mode()
    def clear(self, slot: int) -> None:
        """Leave nothing of a faulty sequence in a slot."""
        self.prefixes.spoilt(slot)
        self.pool.clear(slot)

    def _copy(self, source: int, target: int, length: int) -> None:
        """Copy columns of a slot to another, except those that the target already has from a shared prefix."""
        with self.prefixes.copying(source, target, length) as equal:
            self.pool.copy(source, target, length, equal)

    @torch.inference_mode()
    def read(self, sequence: Sequence, branches: ContrastiveBranches) -> None:
        """Move the measurements of a finished sequence from its slot to the CPU."""
        for name, part in (*self.recorders.items(), *self.interventions.items()):
            if (measured := part.take(sequence)) is not None:
                sequence.output.taken[name] = measured
        contrast = sequence.spec.contrast
        if contrast is not None:
            sequence.output.taken[contrast.name()] = branches.take(sequence)

    def _place(self, sequence: Sequence) -> None:
        """Write a sequence's settings into its slot."""
        fill_slot(self.rope_delta, sequence.slot, sequence.prefill.rope_delta)
        fill_slot(self.position, sequence.slot, sequence.prompt.length)
        self.choice.place(sequence)
        for part in self._parts:
            slots = self._occupied[part.name]
            holds = part.holds(sequence)
            if holds:
                slots.add(sequence.slot)
            if sequence.slot in slots:
                part.place(sequence)
            if not holds:
                slots.discard(sequence.slot)


def _concerns(part: Slots, sequence: Sequence) -> bool:
    """Return True where an intervention or recorder takes part in the passes of a sequence."""
    return part.concerns(sequence.spec.asked, sequence.spec.signals)
