"""Work around each pass of a worker: it says which tokens are steered and read, and gathers what was read."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from vllm.distributed import get_tensor_model_parallel_world_size, tensor_model_parallel_all_reduce

from helmsight_vllm.answer import Answer
from helmsight_vllm.arrays import sent
from helmsight_vllm.attention import AttentionReader, method_of
from helmsight_vllm.faults import Chosen, Faults, Part
from helmsight_vllm.layers import decoder_layers, extend, observe, splits
from helmsight_vllm.looks import MapLook, Span
from helmsight_vllm.masks import chosen_by_picture
from helmsight_vllm.plan import Ints, Plan, name_of, plan_of
from helmsight_vllm.steps import Step, step_of
from helmsight_vllm.table import AdditionTable

KEPT = 1024
"""The number of ended answers whose measurements wait to be fetched."""


class Runtime:
    """Steers and reads the answers of a runner's batch. It is the observer of the layers."""

    def __init__(self, runner: Any):
        config = runner.vllm_config
        model = config.model_config
        self._runner = runner
        self._layers, self._width = model.get_total_num_hidden_layers(), model.get_hidden_size()
        slots, tokens = config.scheduler_config.max_num_seqs, config.scheduler_config.max_num_batched_tokens
        self._rows = torch.zeros(tokens, dtype=torch.int64, device=runner.device)
        self.table = AdditionTable(self._layers, self._width, slots, model.dtype, runner.device)
        layers, attentions = decoder_layers(config.compilation_config.static_forward_context, runner.model)
        if len(layers) != self._layers:
            raise ValueError(f"helmsight-vllm finds {len(layers)} decoder layers of {self._layers} in this model.")
        self._attending = len(attentions)
        self.recurrent = self._attending < len(layers)
        self.splits = all(map(splits, {type(layer) for layer in layers}))
        for number, layer in enumerate(layers):
            extend(layer, number, self.table.rows[number], self._rows)
        self.faults = Faults()
        method = method_of(attentions, config, runner.device)
        self._reader = None if method is None else AttentionReader(attentions, method, self.faults)
        self.steps = {"all": 0, "steered": 0}
        self._written = 0  # the number of rows that the last step wrote
        self.answers: dict[str, Answer | None] = {}  # by request; None for one without a plan
        self._ended: OrderedDict[str, Answer] = OrderedDict()
        self._steps = list[Step]()
        self._inverse: Chosen | None = None
        self._states: Chosen | None = None
        self._think: Chosen | None = None
        self._seen: list[torch.Tensor] = []
        self._before: dict[int, torch.Tensor] = {}
        self._pictured: list[tuple[Answer, Ints, Ints]] = []  # with rows of the step, and numbers of patches
        self._due: list[tuple[Answer, int, int, MapLook]] = []  # with places in the batch, and numbers of tokens
        observe(self)

    @property
    def reads_attention(self) -> bool:
        """True where attention can be read of every layer; known when the cache is there."""
        return self._reader is not None and self._reader.method.plain()

    # -- each step -----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Prepare a pass of the runner's batch."""
        batch = self._runner.input_batch
        self._forget()
        starts, computed = self._runner.query_start_loc.np, batch.num_computed_tokens_cpu
        requests = batch.req_ids[: batch.num_reqs]
        together = any(request not in self.answers or self._is_masked(request) for request in requests)
        rows = np.zeros(int(starts[batch.num_reqs]), np.int64)
        self._steps, self._pictured, self._due, self._seen = [], [], [], []
        for place, request in enumerate(requests):
            answer = self._answer(request)
            if answer is not None and not answer.failed:
                with self.faults.of(answer):
                    first, last, start = int(starts[place]), int(starts[place + 1]), int(computed[place])
                    step = step_of(answer, place, first, start, start + last - first)
                    if self._reader is not None:
                        self._begin_map(self._reader, step)
                    self._steps.append(step)
        if together:
            self._agree(requests)
        steps = self._steps = [step for step in self._steps if not step.answer.failed]
        self._due = [due for due in self._due if not due[0].failed]
        for step in steps:
            if step.rows is not None:
                rows[step.first : step.first + len(step.rows)] = step.rows
        self._write(rows)
        self.steps["all"] += 1
        self.steps["steered"] += bool(rows.any())
        self._inverse, self._states, self._think = (
            self._chosen((step, getattr(step, name)) for step in steps) for name in ("inverse", "states", "think")
        )
        if self._reader is not None:
            self._begin_reading(self._reader, steps)
            self._reader.maps = [look for *_, look in self._due]

    def _agree(self, requests: Sequence[str]) -> None:
        """Let answers fail on every rank that failed on one, before ranks compute something of them together.

        That may be in steps in which an answer begins, the reading of whose vectors may fail on one rank, and with masks.
        """
        if get_tensor_model_parallel_world_size() > 1:
            names = [name_of(self._runner.requests[request]) for request in requests]
            failed = self.faults.agree(
                names, lambda counts: tensor_model_parallel_all_reduce(counts.to(self._rows.device))
            )
            for answer in self.answers.values():
                if answer is not None and answer.name in failed:
                    answer.failed = True

    def end(self, output: Any) -> None:
        """Gather what the pass has shown; `output` is the model's, of which the first are the normalised last states."""
        last = output[0] if isinstance(output, tuple) else output
        for answer, rows, patches in self._pictured:
            with self.faults.of(answer):
                answer.add_image_states(patches, last[torch.from_numpy(rows).to(last.device)].to("cpu", torch.float32))
        if self._reader is not None:
            self._reader.end()
        if self._states is not None and self._seen:
            states = torch.stack(self._seen).to("cpu", torch.float32)
            for answer, begin, end, start in self._states.parts:
                with self.faults.of(answer):
                    for place in range(begin, end):
                        answer.add_states(start + place - begin, states[:, place])
        for step in self._steps:
            step.answer.counted = max(step.answer.counted, step.stop)
        self._inverse = self._states = self._think = None
        self._before.clear()

    def make_masks(self, logits: torch.Tensor) -> None:
        """Make the masks that are due, of the pass's logits (answers, vocabulary) before any contrast.

        Ranks compute attention and logits together: a rank that has failed takes part with NaN, and so all of them fail.
        """
        for answer, place, tokens, look in self._due:
            states = answer.image_states
            sums = torch.full_like(look.sums, torch.nan) if answer.failed or states is None else look.sums
            attention = mean_over_ranks(sums / len(look.layers)).cpu()
            with self.faults.of(answer):
                if states is None or bool(attention.isnan().any()):
                    raise RuntimeError("The attention to the pictures is not known.")
                scores = self._runner.model.compute_logits(states.to(logits.device, self.table.rows.dtype))
                activation = scores[:, logits[place].argmax()].float().relu().cpu()
                mask: Any = answer.plan.mask
                sizes = [len(image) for image in mask["images"]]
                answer.add_mask(tokens, chosen_by_picture(attention, activation, sizes, mask["top"]))
        self._due = []

    def mask(self, number: str, tokens: int) -> list[list[int]] | None:
        """Return an answer's mask from a generated token on; None where it is not made yet."""
        if number in self.faults.errors:
            raise RuntimeError(self.faults.errors[number])
        masks = [mask for answer in self.answers.values() if answer is not None and answer.plan.number == number
                 for mask in answer.masks]  # fmt: skip
        return next((mask["patches"] for mask in masks if mask["token"] == tokens), None)

    def take(self, number: str, fed: int) -> dict[str, Any] | None:
        """Return what was measured of an answer that has ended, and forget it; None where nothing is known of it."""
        self._forget()
        if (failure := self.faults.errors.pop(number, None)) is not None:
            self._ended.pop(number, None)
            raise RuntimeError(failure)
        answer = self._ended.pop(number, None)
        if answer is None:  # it ended in the last step, and the runner learns that with the next one
            running = (answer for answer in self.answers.values() if answer is not None)
            answer = next((other for other in running if other.plan.number == number), None)
            if answer is None:
                return None
            answer.fetched = True
        return answer.taken(fed)

    def held(self) -> dict[str, int]:
        """Return the number of answers that run, and of ended ones whose measurements wait to be fetched."""
        self._forget()
        return {"running": sum(answer is not None for answer in self.answers.values()), "kept": len(self._ended)}

    # -- as observer of the layers -------------------------------------------------------------------------------------

    def enter(self, layer: int, update: torch.Tensor, stream: torch.Tensor | None) -> None:
        if (think := self._think) is not None:
            before = self.faults.computed(think, lambda where, _: _stream(update, stream, think.rows[where]))
            if before is not None:
                self._before[layer] = before

    def leave(self, layer: int, update: torch.Tensor, stream: torch.Tensor | None) -> None:
        if self._think is not None and layer in self._before and stream is not None:
            self._damp(self._think, layer, update, stream)
        if (chosen := self._inverse) is not None:
            inverse = self.faults.computed(
                chosen, lambda where, _: 1 / _stream(update, stream, chosen.rows[where]).norm(dim=-1)
            )
            for (answer, _, _, start), own in _divided(inverse, chosen):
                with self.faults.of(answer):
                    classes = torch.from_numpy(answer.plan.classes[start : start + len(own)])
                    answer.inverse[layer].index_add_(0, classes, own.cpu())
        if (read := self._states) is not None:

            def states(where: slice, _: object) -> torch.Tensor:
                rows = read.rows[where]
                return _stream(update, stream, rows) + self.table.rows[layer, self._rows[rows]].float()

            if (seen := self.faults.computed(read, states)) is not None:
                self._seen.append(seen)

    def _damp(self, think: Chosen, layer: int, update: torch.Tensor, stream: torch.Tensor) -> None:
        before = self._before.pop(layer)

        def damped(where: slice, parts: Sequence[Part]) -> torch.Tensor:
            rows = think.rows[where]
            ffn = update[rows].float()
            differs = divergence(stream[rows].float() - before[where], ffn)
            settings = [(end - begin, answer.plan.think or {}) for answer, begin, end, _ in parts]
            counts = torch.tensor([count for count, _ in settings])
            thresholds, gammas = (
                torch.tensor(values).repeat_interleave(counts).to(update.device)
                for values in zip(*((asked["thresholds"][layer], asked["gamma"]) for _, asked in settings), strict=True)
            )
            over = differs > thresholds
            measured = torch.stack([over.float(), differs], -1).cpu()
            update[rows] = (ffn * torch.where(over, gammas, 1.0)[:, None]).to(update.dtype)
            return measured

        for (answer, _, _, start), own in _divided(self.faults.computed(think, damped), think):
            with self.faults.of(answer):
                answer.add_thoughts(layer, start, own)

    # -- what a step needs ---------------------------------------------------------------------------------------------

    def _answer(self, request: str) -> Answer | None:
        """Return the answer to a request with its rows of the table; None for one without a plan, or whose plan fails."""
        if request not in self.answers:
            self.answers[request] = None
            state = self._runner.requests[request]
            if (name := name_of(state)) is not None:
                try:
                    if name in self.faults.errors:
                        raise RuntimeError(self.faults.errors[name])  # the other side of a pair
                    plan = Plan.of(state.sampling_params.extra_args)
                    if plan is not None:
                        self.answers[request] = Answer(plan, self.table, self._layers, self._width, self._attending)
                except Exception as error:
                    self.faults.fail(name, error)
        return self.answers[request]

    def _is_masked(self, request: str) -> bool:
        """Return True for a request whose plan has masks, on every rank alike."""
        return "mask" in (plan_of(self._runner.requests[request]) or {})

    def _write(self, rows: Ints) -> None:
        """Write the rows of a step's tokens; a step without any writes only where one before has."""
        used = len(rows) if rows.any() else 0
        count = max(used, self._written)
        if count:
            padded = np.zeros(count, np.int64)
            padded[:used] = rows[:used]
            self._rows[:count].copy_(torch.from_numpy(padded), non_blocking=True)
        self._written = used

    def _chosen(self, positions: Iterable[tuple[Step, range]]) -> Chosen | None:
        """Return the tokens at positions of answers; None where there are none."""
        rows, chosen = list[int](), list[Part]()
        for step, own in positions:
            if own:
                chosen.append(Part(step.answer, len(rows), len(rows) + len(own), own.start))
                rows += (step.first - step.start + position for position in own)
        return Chosen(torch.tensor(rows, device=self._rows.device), chosen) if rows else None

    def _begin_reading(self, reader: AttentionReader, steps: list[Step]) -> None:
        spans = [
            Span(step.answer, step.place, step.first, step.start, step.stop, step.looked)
            for step in steps
            if step.looked is not None
        ]
        if spans:
            width = max(step.answer.plan.attention.count for step in steps if step.answer.plan.attention is not None)
            reader.begin(spans, width)

    def _begin_map(self, reader: AttentionReader, step: Step) -> None:
        answer, stop = step.answer, step.stop
        if len(step.patches):
            rows = step.first - step.start + answer.image_columns[step.patches]
            self._pictured.append((answer, rows, step.patches))
        if step.due:
            mask = answer.plan.mask or {}
            columns = sent(answer.image_columns, reader.method.device)
            look = MapLook(answer, step.place, step.first + stop - step.start - 1, stop, columns, mask["layers"])
            self._due.append((answer, step.place, stop - answer.plan.length, look))

    def _forget(self) -> None:
        """Release what requests hold that the runner no longer has."""
        for request in [request for request in self.answers if request not in self._runner.requests]:
            answer = self.answers.pop(request)
            if answer is None:
                continue
            with self.faults.of(answer):
                answer.release()
            reads = answer.plan.reads or answer.plan.rule is not None
            if answer.plan.leads and reads and not (answer.fetched or answer.failed):
                self._ended[answer.plan.number] = answer
                while len(self._ended) > KEPT:
                    self._ended.popitem(last=False)


def mean_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """Return the mean of values over tensor-parallel ranks, each of which has its own heads."""
    ranks = get_tensor_model_parallel_world_size()
    return values if ranks == 1 else tensor_model_parallel_all_reduce(values) / ranks


def divergence(mha: torch.Tensor, ffn: torch.Tensor) -> torch.Tensor:
    """Return KL(softmax(mha) || softmax(ffn)) over the components of updates (..., d), in nats (SAGE, Think)."""
    p, q = mha.log_softmax(-1), ffn.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def _divided(values: torch.Tensor | None, chosen: Chosen) -> Iterable[tuple[Part, torch.Tensor]]:
    """Return chosen tokens' values by part; nothing where there are none."""
    return () if values is None else [(part, values[part.begin : part.end]) for part in chosen.parts]


def _stream(update: torch.Tensor, stream: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor:
    """Return the residual stream of some tokens, (k, d) float32."""
    values = update[rows].float()
    return values if stream is None else values + stream[rows].float()
