"""Tensors in, tokens out: prefill of new prompts and one decode step for every running sequence."""

from __future__ import annotations

import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.fx.experimental._config

from steering.compiled.steps import CompiledSteps
from steering.decoder.attention import Decode, Prefill, Ragged
from steering.decoder.hooks import NO_HOOKS, AttentionHook, Hook, Hooks, LayerHook, Observer
from steering.devices import fill, sent
from steering.model.embedded import Embedded
from steering.model.images import ImageCache
from steering.model.mllm import MLLM
from steering.protocol import intervention, recorder
from steering.protocol.sequence import Sequence
from steering.protocol.slots import Computed, DecodeBatch, Pool, PrefillChunk, Slots
from steering.runner.choice import Chooser
from steering.runner.columns import columns_of
from steering.runner.concerned import Concerned, Concerns
from steering.runner.embedding import Embedder
from steering.runner.prefix import PrefixCache
from steering.runner.room import SHARE, allotted
from steering.runner.sampler import Sampled
from steering.runner.threads import PassThreads
from steering.runner.twins import Combined, RuleSlots, Twins, replayed, rows_of


class _Computed(NamedTuple):
    """What a decode computed and nobody knows yet; hooks by the slots that they are of."""

    batch: DecodeBatch
    concerned: Concerned
    hooks: dict[str, Hook | None]
    computed: Computed


class Decoded(NamedTuple):
    """What a decode said. logits: (rows, vocabulary) before any contrast, as grammars leave them. spoilt: sequences of which
    something could not be kept, and why."""

    sampled: Sampled
    logits: torch.Tensor
    spoilt: dict[Sequence, Exception]


class Runner:
    """Owns every tensor with a slot dimension: keys and values, tokens, and the slots of all interventions and recorders."""

    @torch.inference_mode()  # compiled code is made for one kind of tensors
    def __init__(
        self,
        mllm: MLLM,
        slots: int,
        length: int,
        max_images: int,
        image_cache_bytes: int = 0,
        prefix_cache_bytes: int = 0,
        compiled: bool = False,
        share: float = SHARE,
        steps: CompiledSteps | None = None,
    ):
        """`compiled` has torch compile the decode step at its first use; `steps` are those that were compiled before."""
        self.mllm = mllm
        self.steps = steps
        self._threads = PassThreads(mllm)
        self._decode_step = _compiled(mllm.decoder) if compiled else mllm.decoder
        self._weights = sum(one.nbytes for one in mllm.decoder.parameters())
        self.image_cache = ImageCache(image_cache_bytes)
        kept = image_cache_bytes + prefix_cache_bytes
        self.pool = allotted(mllm, slots, length, compiled, share, kept)
        slots, length = self.pool.slots, self.pool.length
        self.choice = Chooser(mllm, slots)
        self.token = torch.zeros(slots, dtype=torch.int64, device=mllm.device)
        self.position = torch.zeros(slots, dtype=torch.int64, device=mllm.device)
        self.rope_delta = torch.zeros(slots, dtype=torch.int64, device=mllm.device)
        size = Pool(mllm, slots, length, max_images)
        interventions = {name: made for name, (_, made) in intervention.REGISTRY.items() if made is not None}
        self.rules = RuleSlots("twins", size)
        self.recorders = {name: made(name, size) for name, made in recorder.REGISTRY.items()}
        self.interventions = {name: made(name, size) for name, made in interventions.items()}
        self._held: defaultdict[str, set[int]] = defaultdict(set)  # by part, the slots that are not neutral
        self._always = torch.ones(1, 1, 1, device=mllm.device)
        self.concerns = Concerns(self.recorders, self.interventions)
        self.prefixes = PrefixCache(self.pool, self.concerns, prefix_cache_bytes if mllm.rotates_alike else 0)
        self.embedder = Embedder(mllm, self.image_cache, self.prefixes)
        if steps is not None:  # a text's positions are the same on each axis
            self.embedder.rope_axes = steps.axes

    @property
    def _every(self) -> tuple[Slots, ...]:
        return (*self.recorders.values(), *self.interventions.values(), self.rules)

    def stats(self) -> dict[str, int]:
        """Bytes of all slots: of keys and values, on a CPU made at the first prompt, with how many tokens fit; and of all
        else. What both caches keep and count."""
        parts = [part for slots in self._every for part in vars(slots).values()]
        state = sum(part.nbytes for part in parts if isinstance(part, torch.Tensor))
        kv = {"kv_bytes": self.pool.bytes, "kv_max_tokens": self.pool.slots * self.pool.length}
        return {**kv, "state_bytes": state, **self.image_cache.stats(), **self.prefixes.stats()}

    @torch.inference_mode()
    def embed(self, sequences: Iterable[Sequence]) -> None:
        """Make the decoder's inputs of prompts that have none yet."""
        self.embedder.embed(sequences)

    @torch.inference_mode()
    def prefill(self, sequences: list[Sequence], budget: int) -> torch.Tensor | None:
        """Run the prompts of several sequences whole, or the next chunk of a single long one or of its replay; but for what
        is known of them.

        Returns the last logits (rows, vocabulary), or None while a prompt is not complete.
        """
        if sequences[0].computed >= sequences[0].prompt.length:
            return self._feed(*replayed(sequences[0], budget))
        self.embed(sequences)
        for sequence in sequences:
            if not sequence.computed and sequence.embedded is not None:
                self._place(sequence)
                self.prefixes.begin(sequence, sequence.embedded)
                if sequence.computed < sequence.unseen:  # which was known when it was embedded, and is no longer
                    sequence.embedded = None
                    self.embedder.embed([sequence], whole=True)
        prompts = [sequence.embedded for sequence in sequences if sequence.embedded is not None]
        starts, ends = [sequence.computed for sequence in sequences], [prompt.length for prompt in prompts]
        if len(prompts) == 1 and prompts[0].divisible:
            ends = [min(ends[0], starts[0] + budget)]
        parts = [prompt.cut(*part) for prompt, *part in zip(prompts, starts, ends, strict=True)]
        inputs = parts[0] if len(parts) == 1 else Embedded.join(parts)
        lengths = [end - start for start, end in zip(starts, ends, strict=True)]
        chunk = PrefillChunk(sequences, starts, lengths, complete=ends[0] == prompts[0].length)
        computed = self.run_chunk(chunk, inputs)
        for sequence, length in zip(sequences, lengths, strict=True):
            sequence.computed += length
        if computed.logits is None:
            return None
        for row, sequence in enumerate(sequences):
            sequence.embedded = None
            if sequence.expects_forks:
                sequence.prompt_left = {part.name: part.left(sequence) for part in self._every}
                sequence.prompt_logits = computed.logits[row]
        return None if sequences[0].replay else computed.logits

    def run_chunk(self, chunk: PrefillChunk, inputs: Embedded) -> Computed:
        """Run a part of some prompts, of which these are the decoder's inputs."""
        arguments = inputs.arguments
        if any(chunk.starts):
            arguments["attention_mask"] = self._own_mask(1)
        with self._threads.taken(len(chunk.sequences) * chunk.width):
            return self._computed(
                chunk, lambda step: self.mllm.decoder(**arguments, use_cache=False, step=step), inputs
            )

    def _computed(
        self, chunk: PrefillChunk, decoder: Callable[[Prefill], Any], inputs: Embedded | None = None
    ) -> Computed:
        """Run a chunk under its hooks, and keep what they measured. inputs: what the decoder receives, where it is a
        prompt."""
        concerned = self.concerns.of(chunk.sequences)
        hooks = {part.name: part.prefill(chunk) for part in concerned.acting}
        acting = Hooks.of(hooks.values())
        computed = None
        if self.steps is not None and inputs is not None and inputs.plain and acting == NO_HOOKS:
            computed = self.steps.prefill(self.embedder.rope_axes, inputs.embeds, inputs.positions, chunk, self.pool)
        if computed is None:
            ragged = Ragged(chunk.starts, chunk.lengths) if len(set(chunk.starts)) > 1 else None
            step = Prefill(self.pool, chunk.rows, chunk.starts[0], acting, ragged)
            hidden: torch.Tensor = decoder(step).last_hidden_state.to(self.mllm.device)
            logits = None
            if chunk.complete:
                last = sent(chunk.last, hidden.device)
                logits = self.mllm.head(hidden[torch.arange(len(last), device=last.device), last])
            computed = Computed(hidden, logits)
        self.prefixes.measured(chunk, hooks, computed)
        for part in concerned.keeping:
            part.keep(chunk, hooks[part.name], computed)
        return computed

    def _feed(self, chunk: PrefillChunk, generated: tuple[int, ...]) -> torch.Tensor | None:
        """Feed a sequence tokens of its answer, many at once.

        Returns the last logits (1, vocabulary), or None while there is more.
        """
        (sequence,) = chunk.sequences
        tokens = sent(torch.tensor(generated), self.mllm.device)
        positions = torch.arange(len(tokens), device=tokens.device) + chunk.starts[0] + sequence.rope_delta
        computed = self._computed(
            chunk, lambda step: self._decoder_output(self.mllm.decoder, tokens[None], positions[None], step)
        )
        sequence.computed += len(tokens)
        return computed.logits

    @torch.inference_mode()
    def fork(self, sequences: list[Sequence]) -> torch.Tensor:
        """Start sequences whose prompt another one has in its slot already. Returns the last logits (rows, vocabulary)."""
        logits = []
        for sequence in sequences:
            source = sequence.fork_of
            assert source is not None
            assert source.prompt_left is not None
            assert source.prompt_logits is not None
            sequence.rope_delta = source.rope_delta
            self._place(sequence)
            self.pool.copy(source.slot, sequence.slot, source.prompt.length)
            for part in self._every:
                part.restore(sequence, source.prompt_left[part.name])
            sequence.computed = source.prompt.length
            if sequence.pair is not None and source.pair is not None and sequence.is_leader:
                sequence.pair.made = source.pair.made[:1]
            logits.append(source.prompt_logits)
        return torch.stack(logits)

    @torch.inference_mode()
    def next_tokens(self, sequences: list[Sequence], logits: torch.Tensor) -> Sampled:
        """Sample outside of a decode: the first token, or the one that ends a wait. logits: (rows, vocabulary)."""
        for one in rows_of(sequences):
            fill(self.position, one.slot, one.computed + len(one.tokens))
        for sequence in sequences:
            if sequence.held:  # meanwhile, its row counted tokens that are none
                self.choice.place(sequence)
        logits = self.choice.masked(sequences, logits)
        rows = sent(torch.tensor([sequence.slot for sequence in sequences]), logits.device)
        sampled = self.choice.sampled(sequences, self.concerns.of(sequences).acting, rows, self.position[rows], logits)
        self.token[rows] = sampled.tokens
        for row, sequence in enumerate(sequences):
            if sequence.twin is not None:
                self.token[sequence.twin.slot] = sampled.tokens[row]
        return sampled

    @torch.inference_mode()
    def decode(self, running: list[Sequence], twins: Twins) -> Decoded:
        """One token for every running sequence; row i is slot i.

        What later steps build on changes at the end alone, so that a step that raised may be run again. Behind that point
        it cannot: what raises there spoils the sequences that it concerns.
        """
        with self._threads.taken(len(running)):
            return self._decoded(running, twins)

    def _decoded(self, running: list[Sequence], twins: Twins) -> Decoded:
        decoded = self._decode(running)
        logits = decoded.computed.logits
        assert logits is not None
        logits = self.choice.masked(running, logits)
        combined: Combined = twins.combine(running, logits)
        rows = decoded.batch.rows
        sampled = self.choice.sampled(running, decoded.concerned.acting, rows, self.position[rows] + 1, combined.logits)
        spoilt = self._record(decoded)
        try:
            twins.record(combined)
        except Exception as error:
            spoilt |= dict.fromkeys((one for one in running if one.pair is not None), error)
        self.token[rows] = sampled.tokens
        if combined.leaders is not None and combined.twins is not None:
            self.token[combined.twins] = sampled.tokens[combined.leaders]
        return Decoded(sampled, logits, spoilt)

    @torch.inference_mode()
    def decode_logits(self, running: list[Sequence]) -> torch.Tensor:
        """Feed every running sequence's last token: (rows, vocabulary), and the captures of the sequences that want them."""
        decoded = self._decode(running)
        for error in self._record(decoded).values():
            raise error
        assert decoded.computed.logits is not None
        return decoded.computed.logits

    def blamed(self, error: Exception, running: list[Sequence]) -> list[Sequence]:
        """The sequences whose intervention, or whose recorder, raised in a decode of `running`; all where nobody's did."""
        own = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
        modules = {type(one).__module__ for one in own if isinstance(one, Slots | AttentionHook | LayerHook | Observer)}
        parts = [part for part in self._every if type(part).__module__ in modules]
        return [
            one for one in running if any(part.concerns(one.spec.asked, one.spec.signals) for part in parts)
        ] or running

    def _decode(self, running: list[Sequence]) -> _Computed:
        """Feed every running sequence's last token; writes nothing but that token's columns of the pool."""
        count = len(running)
        columns = columns_of([sequence.length + 1 for sequence in running], self.pool, self.mllm.device.type)
        positions = self.position[:count].clone()
        # A row that is held only keeps its place: its twin is still in prefill, and what it does now is written over.
        active = self._always
        if any(sequence.held for sequence in running):
            kept = [[[float(not sequence.held)]] for sequence in running]
            active = sent(torch.tensor(kept), positions.device)
        batch = DecodeBatch(running, positions, columns.longest, active.expand(count, 1, 1))
        concerned = self.concerns.of(running)
        hooks = {part.name: part.decode(batch) for part in concerned.acting}
        # Compiled is what most steps are; the others would need code of their own for every mixture of them, or of lengths.
        long = columns.saved > self._weights
        if self.steps is not None and not long:
            made = [hook for hook in hooks.values() if hook is not None]
            tokens, rope = self.token[:count], positions + self.rope_delta[:count]
            computed = self.steps.decode(
                made, self.embedder.rope_axes, tokens, positions, rope, columns.longest, self.pool
            )
            if computed is not None:
                return _Computed(batch, concerned, hooks, computed)
        plain = long or any(hooks[part.name] is not None and not part.compiled for part in concerned.acting)
        apart = (columns.common, columns.apart) if plain or self._decode_step is self.mllm.decoder else ()
        step = Decode(self.pool, positions, columns.longest, Hooks.of(hooks.values()), *apart)
        rope = (positions + self.rope_delta[:count])[:, None]
        decoder = self.mllm.decoder if plain else self._decode_step
        hidden = self._decoder_output(decoder, self.token[:count, None], rope, step).last_hidden_state
        hidden = hidden.to(self.mllm.device)
        return _Computed(batch, concerned, hooks, Computed(hidden, self.mllm.head(hidden[:, -1])))

    def _record(self, decoded: _Computed) -> dict[Sequence, Exception]:
        """Keep what a decode computed. Returns the sequences of which something could not be kept, and why."""
        spoilt: dict[Sequence, Exception] = {}
        for part in decoded.concerned.keeping:
            try:
                part.record(decoded.batch, decoded.hooks[part.name], decoded.computed)
            except Exception as error:
                spoilt |= dict.fromkeys(
                    (one for one in decoded.batch.sequences if part.concerns(one.spec.asked, one.spec.signals)), error
                )
        self.position[decoded.batch.rows] += decoded.batch.active[:, 0, 0].long()
        return spoilt

    def _decoder_output(
        self, decoder: Callable[..., Any], tokens: torch.Tensor, positions: torch.Tensor, step: Prefill | Decode
    ) -> Any:
        """The decoder's output of generated tokens (rows, n) at rotary positions (rows, n)."""
        if (axes := self.embedder.rope_axes) is not None:
            positions = positions.expand(axes, -1, -1)
        return decoder(
            inputs_embeds=self.mllm.model.get_input_embeddings()(tokens),
            position_ids=positions,
            attention_mask=self._own_mask(len(tokens)),
            use_cache=False,
            step=step,
        )

    def _own_mask(self, rows: int) -> torch.Tensor:
        """Stands for a mask that our attention makes itself; it keeps the model from building one."""
        return torch.ones(rows, 1, 1, 1, dtype=torch.bool, device=self.mllm.device)

    @torch.inference_mode()
    def move(self, source: int, target: int, length: int) -> None:
        """Move a sequence with `length` used columns to another slot."""
        self.pool.copy(source, target, length)
        for tensor in (self.token, self.position, self.rope_delta):
            tensor[target] = tensor[source]
        self.choice.move(source, target)
        for part in self._every:
            held = self._held[part.name]
            if source in held or target in held:
                part.move(source, target)
                (held.add if source in held else held.discard)(target)

    @torch.inference_mode()
    def read(self, sequence: Sequence, twins: Twins) -> None:
        """Take what was measured of a finished sequence out of its slot, to the CPU."""
        for name, part in (*self.recorders.items(), *self.interventions.items()):
            if (taken := part.take(sequence)) is not None:
                sequence.taken[name] = taken
        contrast = sequence.spec.contrast
        if contrast is not None:
            sequence.taken[contrast.name()] = twins.take(sequence)

    def _place(self, sequence: Sequence) -> None:
        """Write a sequence's settings into its slot."""
        fill(self.rope_delta, sequence.slot, sequence.rope_delta)
        fill(self.position, sequence.slot, sequence.prompt.length)
        self.choice.place(sequence)
        for part in self._every:
            held = self._held[part.name]
            holds = part.holds(sequence)
            if holds:
                held.add(sequence.slot)
            if sequence.slot in held:
                part.place(sequence)
            if not holds:
                held.discard(sequence.slot)


def _compiled(decoder: torch.nn.Module) -> Callable[..., Any]:
    """The decoder for any number of rows and columns, compiled as one graph."""
    # Else a number of columns that happens to equal the width of a head is taken for that width, which never changes.
    torch.fx.experimental._config.use_duck_shape = False
    return torch.compile(decoder, dynamic=True, fullgraph=True)
