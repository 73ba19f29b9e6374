"""Tensors in, tokens out: prefill of new prompts and one decode step for every running sequence."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.fx.experimental._config

from steering.attention import (
    CAPTURE_ROWS,
    Decode,
    DecodeCapture,
    KVPool,
    Prefill,
)
from steering.diagnostics.captures import ReadoutSlots, image_sums, span_shares
from steering.diagnostics.residual import ResidualSlots
from steering.diagnostics.tam import Earlier, activation_maps, without_interference
from steering.embedded import Embedded
from steering.errors import Fault
from steering.images import ImageCache
from steering.interventions.amplify import AmplifyRows, AmplifySlots
from steering.interventions.contrast import ContrastSlots
from steering.interventions.generate import Mask, mask_of, masked_features
from steering.interventions.sage import SageReadings
from steering.interventions.see import SeeSlots
from steering.interventions.steer import class_count, generated_delta, prompt_classes, prompt_delta
from steering.interventions.think import ThinkSlots
from steering.mllm import MLLM
from steering.residual import DecodeResidual, PrefillResidual
from steering.sampler import Needs, Sampled, SamplerRows, sample
from steering.scores import reply_logprobs
from steering.sequence import Measured, Readings, RowCounts, Sequence
from steering.spans import CONTEXT, FIRST_IMAGE

COLUMN_BUCKET = 64
"""Decode reads a multiple of this many columns, so that shapes repeat."""


class _Decoded(NamedTuple):
    """What a decode computed and nobody knows yet. logits: (rows, vocabulary). hidden: (rows, 1, d), normalised. active:
    (rows, 1, 1), 0 for rows whose step is for nothing. masks: those that were due."""

    step: Decode
    hidden: torch.Tensor
    logits: torch.Tensor
    active: torch.Tensor
    masks: dict[Sequence, Mask]


class Runner:
    """Owns every tensor with a slot dimension. All settings live in fixed tensors, neutral where nothing was asked."""

    @torch.inference_mode()  # compiled code is made for one kind of tensors
    def __init__(
        self, mllm: MLLM, slots: int, length: int, max_images: int, image_cache: ImageCache, compiled: bool = False
    ):
        self.mllm = mllm
        self._decode_step = _compiled(mllm.decoder) if compiled else mllm.decoder
        self.image_cache = image_cache
        if compiled:  # a step that reads all columns would be compiled anew, so there is always one bucket more
            length = (-(-length // COLUMN_BUCKET) + 1) * COLUMN_BUCKET
        self.pool = KVPool(slots, length)
        self.sampler = SamplerRows(slots, mllm.vocab_size, mllm.device)
        device, layers = mllm.device, mllm.num_layers
        self.token = torch.zeros(slots, dtype=torch.int64, device=device)
        self.position = torch.zeros(slots, dtype=torch.int64, device=device)
        self.rope_delta = torch.zeros(slots, dtype=torch.int64, device=device)
        self.delta = torch.zeros(layers, slots, mllm.hidden_size, dtype=mllm.dtype, device=device)
        self.readouts = ReadoutSlots(slots, length, layers, max_images, device)
        self.residual = ResidualSlots(slots, mllm.ffn_widths, mllm.hidden_size, device)
        self.see = SeeSlots(slots, length, layers, device)
        self.think = ThinkSlots(slots, layers, device)
        self.amplify = AmplifySlots(slots, length, layers, device)
        self.contrasts = ContrastSlots(slots, device)
        self.rope_axes: int | None = None
        self._always = torch.ones(1, 1, 1, device=device)

    @torch.inference_mode()
    def embed(self, sequences: Rows[Sequence]) -> None:
        """Make the decoder's inputs of prompts that have none yet; their new images are encoded together."""
        sequences = [sequence for sequence in sequences if sequence.embedded is None]
        shown = [s for s in sequences if s.prompt.pictures and self.mllm.takes_image_features]
        features = self.image_cache.get(self.mllm.image_features, [sequence.prompt.pictures for sequence in shown])
        by_sequence = dict(zip(shown, features, strict=True))
        for sequence in sequences:
            sequence.embedded = self.mllm.embed(sequence.prompt.inputs, by_sequence.get(sequence))
            if sequence.leader is not None and sequence.masks and not sequence.masks[-1].pixels:
                embeds = masked_features(
                    sequence.embedded.embeds, sequence.prompt.layout.images, sequence.masks[-1].chosen
                )
                sequence.embedded = replace(sequence.embedded, embeds=embeds)
            sequence.rope_delta = sequence.embedded.rope_delta
            if sequence.embedded.positions.ndim == 3:
                self.rope_axes = sequence.embedded.positions.shape[0]

    @torch.inference_mode()
    def prefill(self, sequences: Rows[Sequence], budget: int) -> torch.Tensor | None:
        """Run the prompts of several sequences whole, or the next chunk of a single long one or of its replay.

        Returns the last logits (rows, vocabulary), or None while a prompt is not complete.
        """
        if sequences[0].computed >= sequences[0].prompt.length:
            return self._replay(sequences[0], budget)
        self.embed(sequences)
        prompts = [sequence.embedded for sequence in sequences if sequence.embedded is not None]
        start = sequences[0].computed
        end = prompts[0].length
        if len(prompts) > 1:
            batch, lengths = Embedded.join(prompts), [prompt.length for prompt in prompts]
        else:
            if prompts[0].divisible:
                end = min(end, start + budget)
            batch = prompts[0] if (start, end) == (0, prompts[0].length) else prompts[0].cut(start, end)
            lengths = [end - start]
        complete = end == prompts[0].length
        if start == 0:
            for sequence in sequences:
                self._place(sequence)
        last = torch.tensor(lengths, device=self.mllm.device) - 1
        slots = [sequence.slot for sequence in sequences]
        step = Prefill(
            self.pool,
            slots,
            self._prefill_residual(sequences, start, lengths, last if complete else None),
            start,
            self.readouts.capture(sequences, start, lengths, complete, self.mllm.focus_layers),
            self.see.rows(slots, [sequence.see for sequence in sequences], start + max(lengths), generated=False),
            self._prefill_amplify(sequences, lengths) if complete else None,
        )
        arguments = batch.arguments
        if start:
            arguments["attention_mask"] = self._own_mask(1)
        hidden = self.mllm.decoder(**arguments, use_cache=False, step=step).last_hidden_state
        self._keep(sequences, step, lengths, hidden, start)
        for row, sequence in enumerate(sequences):
            if sequence.wants_scores:
                scores = reply_logprobs(self.mllm, sequence.prompt, hidden[row, : lengths[row]], start)
                sequence.captured.scores.append(scores)
        if not complete:
            return None
        logits = self.mllm.head(hidden[torch.arange(len(last), device=last.device), last])
        for row, sequence in enumerate(sequences):
            captured = sequence.captured
            if captured.image_states:  # kept in the order of columns
                order = sequence.prompt.layout.image_columns.argsort().argsort()
                captured.image_states = [torch.cat(captured.image_states)[order.to(hidden.device)]]
            if sequence.generate is not None and step.capture is not None and step.capture.maps is not None:
                sequence.masks += (self._mask(sequence, logits[row], step.capture.maps[row]),)
                self._keep_image_states(sequence)
            if sequence.wants_states:
                captured.next_logprobs = logits[row].log_softmax(-1).to("cpu", copy=True)
            sequence.embedded = None
            if sequence.expects_forks:
                captured.prompt_logits = logits[row]
        return None if sequences[0].replay else logits

    def _replay(self, sequence: Sequence, budget: int) -> torch.Tensor | None:
        """Feed what was generated before a twin joined, as decoding would have: the next chunk of it.

        Returns the last logits (1, vocabulary), or None while there is more.
        """
        if sequence.see is not None:  # which needs the attention weights of all these rows
            budget = min(budget, CAPTURE_ROWS)
        rows, start = [sequence.slot], sequence.computed
        fed = start - sequence.prompt.length
        tokens = torch.tensor(sequence.replay[fed : fed + budget], device=self.mllm.device)
        think = self.think.rows(rows, [sequence.think], torch.ones(1, len(tokens), device=tokens.device))
        step = Prefill(
            self.pool,
            rows,
            DecodeResidual(self.delta[:, rows], think),
            start,
            see=self.see.rows(rows, [sequence.see], start + len(tokens), generated=True),
        )
        positions = torch.arange(start, start + len(tokens), device=tokens.device) + sequence.rope_delta
        hidden = self._decoder_output(self.mllm.decoder, tokens[None], positions[None], step)
        sequence.computed += len(tokens)
        return self.mllm.head(hidden[:, -1]) if fed + len(tokens) == len(sequence.replay) else None

    def _mask(self, sequence: Sequence, logits: torch.Tensor, attention: torch.Tensor) -> Mask:
        """What the twin is not to see from the next token on. logits: (vocabulary,). attention: (columns,)."""
        assert sequence.generate is not None
        head = self.mllm.model.get_output_embeddings().weight[logits.argmax()]
        (states,) = sequence.captured.image_states
        return mask_of(sequence.prompt, states, attention, head, sequence.generate.top, len(sequence.tokens))

    def _keep_image_states(self, sequence: Sequence) -> None:
        """Let go of the states of a sequence's image tokens where no later mask or readout needs them."""
        if sequence.generate is not None and sequence.generate.refresh == 0 and not sequence.wants_activations:
            sequence.captured.image_states = []

    @torch.inference_mode()
    def fork(self, sequences: Rows[Sequence]) -> torch.Tensor:
        """Start sequences whose prompt another one has in its slot already. Returns the last logits (rows, vocabulary)."""
        logits = []
        for sequence in sequences:
            source = sequence.fork_of
            assert source is not None
            kept, measured = source.captured, source.captured.prompt_measured
            assert kept.prompt_logits is not None
            assert measured is not None
            slot = sequence.slot
            sequence.rope_delta = source.rope_delta
            self._place(sequence)
            self.pool.copy(source.slot, slot, source.prompt.length)
            self.see.first[slot] = self.see.first[source.slot]
            self.think.measured[slot] = measured.think
            self.readouts.patches[slot, :, : measured.patches.shape[1]] = measured.patches
            self.residual.sums[slot] = measured.residual
            self.residual.states[:, slot] = measured.states
            sequence.computed = source.prompt.length
            sequence.captured = replace(
                kept, text_states=list(measured.text_states), prompt_logits=None, prompt_measured=None
            )
            sequence.masks = source.masks[:1]
            logits.append(kept.prompt_logits)
        return torch.stack(logits)

    @torch.inference_mode()
    def next_tokens(self, sequences: Rows[Sequence], logits: torch.Tensor) -> Sampled:
        """Sample outside of a decode: the first token, or the one that ends a wait. logits: (rows, vocabulary)."""
        for sequence in sequences:
            for one in (sequence, sequence.twin):
                if one is not None:
                    self.position[one.slot] = one.computed + len(one.tokens)
        rows = torch.tensor([sequence.slot for sequence in sequences], device=logits.device)
        needs = Needs.of([sequence.sampling for sequence in sequences])
        sampled = sample(logits, self.sampler, rows, self.position[rows], needs)
        _force(sampled, logits, sequences)
        self.token[rows] = sampled.tokens
        for row, sequence in enumerate(sequences):
            if sequence.twin is not None:
                self.token[sequence.twin.slot] = sampled.tokens[row]
        return sampled

    @torch.inference_mode()
    def resume(self, sequence: Sequence, twin: torch.Tensor) -> torch.Tensor:
        """The next logits (vocabulary,) of a waiting sequence, contrasted with its twin's."""
        assert sequence.held_logits is not None
        slot = sequence.slot
        generated = torch.tensor(sequence.tokens, dtype=torch.int64)
        self.sampler.place(slot, sequence.sampling, sequence.seed, sequence.prompt.ids, generated)
        return self.contrasts.apply(torch.tensor([slot], device=twin.device), sequence.held_logits[None], twin[None])[0]

    @torch.inference_mode()
    def end_wait(self, sequence: Sequence, logits: torch.Tensor) -> None:
        """The token that `resume` gave logits (vocabulary,) for is sampled: its sequence goes on."""
        assert sequence.held_logits is not None
        slot = torch.tensor([sequence.slot], device=logits.device)
        self.contrasts.count(slot, sequence.held_logits[None], logits[None])
        sequence.held_logits = None

    @torch.inference_mode()
    def decode(self, running: Rows[Sequence]) -> Sampled:
        """One token for every running sequence; row i is slot i. Those whose mask was due wait for a new twin after it.

        What later steps build on changes at the end alone, so that a step that raised may be run again.
        """
        decoded = self._decode(running)
        plain = logits = decoded.logits
        paired = [one for one in running if one.twin is not None and not one.paused and one not in decoded.masks]
        pairs = [(one.slot, one.twin.slot) for one in paired if one.twin is not None]
        if pairs:
            leaders, twins = torch.tensor(pairs, device=logits.device).unbind(1)
            logits = plain.index_copy(0, leaders, self.contrasts.apply(leaders, plain[leaders], plain[twins]))
        rows = slice(0, len(running))
        needs = Needs.of([sequence.sampling for sequence in running])
        sampled = sample(logits, self.sampler, rows, self.position[rows] + 1, needs)
        _force(sampled, logits, running)
        self._record(running, decoded)
        self.token[rows] = sampled.tokens
        if pairs:
            self.contrasts.count(leaders, plain[leaders], logits[leaders])
            self.token[twins] = sampled.tokens[leaders]
        return sampled

    @torch.inference_mode()
    def decode_logits(self, running: Rows[Sequence]) -> torch.Tensor:
        """Feed every running sequence's last token: (rows, vocabulary), and the captures of the sequences that want them."""
        decoded = self._decode(running)
        self._record(running, decoded)
        return decoded.logits

    def _decode(self, running: Rows[Sequence]) -> _Decoded:
        """Feed every running sequence's last token; writes nothing but that token's columns of the pool."""
        count = len(running)
        longest = max(sequence.length for sequence in running) + 1
        columns = min(-(-longest // COLUMN_BUCKET) * COLUMN_BUCKET, self.pool.length)
        positions = self.position[:count].clone()
        wanted = [sequence.diagnose for sequence in running if sequence.diagnose is not None]
        due = [sequence for sequence in running if sequence.mask_due]
        capture = DecodeCapture(self.mllm.num_layers, count, columns, positions.device) if wanted or due else None
        # A paused row only keeps its place: its twin is still in prefill, and what it does now is written over.
        active = self._always
        if any(sequence.paused for sequence in running):
            active = torch.tensor(
                [[[not sequence.paused]] for sequence in running], dtype=torch.float32, device=positions.device
            )
        rows = slice(0, count)
        readout = None
        if any(diagnose.wants_residual for diagnose in wanted):
            readout = self.residual.decode(count, active[:, 0])
        think = self.think.rows(rows, [sequence.think for sequence in running])
        see = self.see.rows(rows, [sequence.see for sequence in running], columns, generated=True)
        amplify = self.amplify.rows(rows, [sequence.pai for sequence in running])
        step = Decode(
            self.pool, positions, columns, DecodeResidual(self.delta[:, rows], think, readout), capture, see, amplify
        )
        # Compiled is what most steps are; the others would need code of their own for every mixture of them.
        special = any(rows is not None for rows in (see, think, amplify, readout))
        decoder = self.mllm.decoder if special else self._decode_step
        rope = (positions + self.rope_delta[:count])[:, None]
        hidden = self._decoder_output(decoder, self.token[:count, None], rope, step)
        logits = self.mllm.head(hidden[:, -1])
        masks = {}
        for sequence in due:
            assert capture is not None
            last_layers = capture.means[-self.mllm.focus_layers :, sequence.slot]
            try:
                masks[sequence] = self._mask(sequence, logits[sequence.slot], last_layers.mean(0))
            except torch.AcceleratorError:
                raise
            except RuntimeError as error:  # of this sequence alone
                sequence.error = Fault(f"The masked image could not be made: {error}")
        return _Decoded(step, hidden, logits, active.expand(count, 1, 1), masks)

    def _record(self, running: Rows[Sequence], decoded: _Decoded) -> None:
        """Keep what a decode computed."""
        step, active = decoded.step, decoded.active
        wanted = [sequence.diagnose for sequence in running if sequence.diagnose is not None]
        if step.capture is not None:
            self.readouts.record(
                step.capture.means,
                step.positions,
                active,
                decay=any(diagnose.include & {"decay", "decay_layers"} for diagnose in wanted),
                patches=any(diagnose.wants_patches for diagnose in wanted),
            )
        if step.residual.readout is not None:
            self.residual.record(step.residual.readout, active)
        self.think.record(step.residual.think, slice(0, len(running)), active)
        if step.see is not None:
            self.see.record(step.see, step.positions)
        self.position[: len(running)] += active[:, 0, 0].long()
        for sequence in running:
            if sequence.wants_text_states and not sequence.paused:
                sequence.captured.text_states.append(decoded.hidden[sequence.slot].clone())
        for sequence, mask in decoded.masks.items():
            sequence.masks += (mask,)
            sequence.held_logits = decoded.logits[sequence.slot]

    def _decoder_output(
        self, decoder: Callable[..., Any], tokens: torch.Tensor, positions: torch.Tensor, step: Prefill | Decode
    ) -> torch.Tensor:
        """Normalised hidden states (rows, n, d) of generated tokens (rows, n) at rotary positions (rows, n)."""
        if self.rope_axes is not None:
            positions = positions.expand(self.rope_axes, -1, -1)
        hidden: torch.Tensor = decoder(
            inputs_embeds=self.mllm.model.get_input_embeddings()(tokens),
            position_ids=positions,
            attention_mask=self._own_mask(len(tokens)),
            use_cache=False,
            step=step,
        ).last_hidden_state
        return hidden

    def _own_mask(self, rows: int) -> torch.Tensor:
        """Stands for a mask that our attention makes itself; it keeps the model from building one."""
        return torch.ones(rows, 1, 1, 1, dtype=torch.bool, device=self.mllm.device)

    @torch.inference_mode()
    def move(self, source: int, target: int, length: int) -> None:
        """Move a sequence with `length` used columns to another slot."""
        self.pool.copy(source, target, length)
        for tensor in (self.token, self.position, self.rope_delta):
            tensor[target] = tensor[source]
        self.delta[:, target] = self.delta[:, source]
        for slots in (
            self.readouts,
            self.residual,
            self.sampler,
            self.see,
            self.think,
            self.amplify,
            self.contrasts,
        ):
            slots.move(source, target)

    @torch.inference_mode()
    def read(self, sequence: Sequence) -> None:
        """Take the readings of a finished sequence out of its slot, to the CPU."""
        if sequence.rule is not None:
            sequence.changed = int(self.contrasts.changed[sequence.slot])
        if sequence.sage is not None:
            first, fed = sequence.prompt.length, max(len(sequence.tokens) - 1, 0)
            sequence.sage_readings = SageReadings(
                self.see.steps[sequence.slot, first : first + fed].to("cpu", copy=True),
                self.think.measured[sequence.slot].to("cpu", copy=True),
                first + fed,
                sequence.masks,
                sequence.changed,
            )
        captured = sequence.captured
        last = captured.last_sums
        if sequence.diagnose is None or captured.sums is None or last is None:
            return
        output = max(len(sequence.tokens) - 1, 0)
        prompt, slot, layout = sequence.prompt.length, sequence.slot, sequence.prompt.layout
        question, modality, anchor = captured.sums.unbind(1)
        rows = RowCounts.of(len(layout.question_rows), output)
        modality_rows = RowCounts.of(len(layout.modality_rows), output)
        patches = self.readouts.patches[slot]
        if rows.last and captured.last_patches is not None:
            patches = captured.last_patches
        generated = self.readouts.sums[slot]
        shares = span_shares(last, self.readouts.content[slot])[None]
        states = None
        if sequence.wants_drift:
            total, latest = self.residual.states[:, slot].to("cpu", copy=True)
            states = torch.stack([total / (output + 1), latest])
        sequence.readings = Readings(
            (last if rows.last else question + generated).cpu(),
            rows,
            (last if modality_rows.last else modality + generated).cpu(),
            modality_rows,
            output,
            torch.cat([shares, self.readouts.decay[slot, prompt : prompt + output]]).cpu(),
            anchor.cpu(),
            patches[:, layout.image_columns.to(self.mllm.device)].cpu(),
            self._activations(sequence) if sequence.diagnose.wants_activations and captured.image_states else None,
            self.residual.sums[slot].to("cpu", copy=True),  # the slot is used again
            self.residual.neuron_ratio(slot).cpu(),
            states,
        )

    def _activations(self, sequence: Sequence) -> torch.Tensor:
        """(steps, patches) on the CPU: token activation maps of the answer's tokens."""
        embedding = self.mllm.model.get_output_embeddings().weight
        stopped = sequence.finish_reason == "stop" and sequence.tokens[-1] in self.mllm.stop_ids
        ids = torch.tensor(sequence.tokens[: -1 if stopped else None], dtype=torch.int64, device=embedding.device)
        (states,), head = sequence.captured.image_states, embedding[ids]
        maps = activation_maps(states, head)
        if not sequence.wants_text_states:
            return maps.cpu()
        prompt = sequence.prompt.ids[_user_text(sequence.prompt.layout.spans)].to(embedding.device)
        earlier = Earlier(
            torch.cat([prompt, ids]),
            torch.cat(sequence.captured.text_states)[: len(prompt) + len(ids)],
            torch.cat([activation_maps(states, embedding[prompt]), maps]),
        )
        return without_interference(maps, ids, head, len(prompt), earlier).cpu()

    def _place(self, sequence: Sequence) -> None:
        """Write a sequence's settings into its slot."""
        slot = sequence.slot
        self.rope_delta[slot] = sequence.rope_delta
        self.position[slot] = sequence.prompt.length
        self.sampler.place(
            slot,
            sequence.sampling,
            sequence.seed,
            sequence.prompt.ids,
            torch.tensor(sequence.tokens, dtype=torch.int64),
        )
        self.delta[:, slot] = generated_delta(sequence.steering, self.mllm.num_layers, self.mllm.hidden_size).to(
            self.delta
        )
        self.see.place(slot, sequence.see, sequence.prompt.layout.spans)
        self.think.place(slot, sequence.think, sequence.thresholds)
        self.amplify.place(slot, sequence.pai, (sequence.prompt.layout.spans >= FIRST_IMAGE).nonzero()[:, 0])
        self.contrasts.place(slot, sequence.rule)
        self.readouts.place(slot, sequence)
        self.residual.place(slot, sequence.diagnose)

    def _prefill_residual(
        self, sequences: Rows[Sequence], start: int, lengths: list[int], last: torch.Tensor | None
    ) -> PrefillResidual:
        steered = [(row, sequence) for row, sequence in enumerate(sequences) if sequence.steering]
        count = class_count(
            (steer for _, sequence in steered for steer in sequence.steering),
            max((len(sequence.prompt.layout.images) for _, sequence in steered), default=0),
        )
        classes = torch.zeros(len(sequences), max(lengths), count)
        tables: dict[int, torch.Tensor] = {}
        for row, sequence in steered:
            spans = sequence.prompt.layout.spans[start : start + lengths[row]]
            classes[row, : lengths[row]] = prompt_classes(spans, count)
            for layer, delta in prompt_delta(sequence.steering, count).items():
                tables.setdefault(layer, torch.zeros(len(sequences), count, delta.shape[1]))[row] = delta
        # A chunk of a long prompt holds the token or does not; of prompts that are run whole every one holds its own.
        read = [sequence.prompt.length + sequence.state_position - start for sequence in sequences]
        here = all(0 <= one < length for one, length in zip(read, lengths, strict=True))
        states = at = None
        if here and any(sequence.wants_states for sequence in sequences):
            at = torch.tensor(read, device=self.mllm.device)
            states = torch.zeros(
                self.mllm.num_layers,
                len(sequences),
                self.mllm.hidden_size,
                dtype=self.mllm.dtype,
                device=self.mllm.device,
            )
        return PrefillResidual(
            classes.to(self.mllm.device),
            {layer: table.to(self.mllm.device, self.mllm.dtype) for layer, table in tables.items()},
            at=at,
            states=states,
            readout=self.residual.prefill([sequence.diagnose for sequence in sequences], lengths, last),
            think=self.think.rows(
                [sequence.slot for sequence in sequences],
                [sequence.think for sequence in sequences],
                (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).float().to(self.mllm.device),
                keep=any(sequence.wants_divergence for sequence in sequences),
            ),
        )

    def _prefill_amplify(self, sequences: Rows[Sequence], lengths: list[int]) -> AmplifyRows | None:
        last = [-1 if s.pai is None else length - 1 for s, length in zip(sequences, lengths, strict=True)]
        slots = [sequence.slot for sequence in sequences]
        return self.amplify.rows(
            slots, [sequence.pai for sequence in sequences], torch.tensor(last, device=self.mllm.device)
        )

    def _keep(
        self, sequences: Rows[Sequence], step: Prefill, lengths: list[int], hidden: torch.Tensor, start: int
    ) -> None:
        """Add what a chunk measured to its sequences."""
        assert isinstance(step.residual, PrefillResidual)
        self.think.record(step.residual.think, step.slots)
        readout = step.residual.readout
        measured, finals = (None, None) if readout is None else (readout.measured(), readout.states())
        for row, sequence in enumerate(sequences):
            captured = sequence.captured
            sequence.computed += lengths[row]
            complete = sequence.computed == sequence.prompt.length
            for layer, norms in step.residual.norms.items():
                captured.norms[layer] = captured.norms.get(layer, 0) + norms[row].cpu()
            if sequence.wants_divergence and step.residual.think is not None:
                kept = step.residual.think.divergences()[:, row, : lengths[row]].cpu()
                earlier = [] if captured.divergence is None else [captured.divergence]
                captured.divergence = torch.cat([*earlier, kept], 1)
            if step.residual.states is not None and sequence.wants_states:
                captured.states = step.residual.states[:, row].float().cpu()
            spans = sequence.prompt.layout.spans[start : start + lengths[row]]
            if sequence.wants_image_states:
                captured.image_states.append(hidden[row, : lengths[row]][(spans >= FIRST_IMAGE).to(hidden.device)])
            if sequence.wants_text_states:
                captured.text_states.append(hidden[row, : lengths[row]][_user_text(spans).to(hidden.device)])
            if measured is not None and finals is not None:
                self.residual.keep(sequence.slot, measured[row], finals[row] if complete else None)
            if step.capture is not None and sequence.wants_shares:
                self.readouts.keep(sequence, step.capture, row)
                if captured.last_sums is not None:
                    self.see.first[sequence.slot] = image_sums(captured.last_sums).sum(-1)
            if complete and sequence.wants_text_states:
                captured.text_states.append(hidden[row, lengths[row] - 1 : lengths[row]])
            if complete and sequence.expects_forks:
                captured.prompt_measured = Measured(
                    self.think.measured[sequence.slot].clone(),
                    self.readouts.patches[sequence.slot, :, : sequence.computed].clone(),
                    self.residual.sums[sequence.slot].clone(),
                    self.residual.states[:, sequence.slot].clone(),
                    tuple(captured.text_states),
                )


def _force(sampled: Sampled, logits: torch.Tensor, sequences: Rows[Sequence]) -> None:
    """Let sequences say what they are to say, in place of what was sampled. logits: (rows, vocabulary)."""
    forced = [(row, s.forced[len(s.tokens)]) for row, s in enumerate(sequences) if len(s.tokens) < len(s.forced)]
    if forced:
        rows, tokens = torch.tensor(forced, device=logits.device).unbind(1)
        sampled.tokens[rows] = tokens
        if sampled.logprob is not None:
            sampled.logprob[rows] = logits[rows].log_softmax(-1).gather(1, tokens[:, None])[:, 0]


def _user_text(spans: torch.Tensor) -> torch.Tensor:
    """(n,) bool: the user's own text."""
    return (spans >= CONTEXT) & (spans < FIRST_IMAGE)


def _compiled(decoder: torch.nn.Module) -> Callable[..., Any]:
    """The decoder for any number of rows and columns, compiled as one graph."""
    # Else a number of columns that happens to equal the width of a head is taken for that width, which never changes.
    torch.fx.experimental._config.use_duck_shape = False
    return torch.compile(decoder, dynamic=True, fullgraph=True)
