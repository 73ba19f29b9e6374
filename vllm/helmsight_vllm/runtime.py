"""Work around each pass of a worker: it says which tokens are steered and read, and gathers what was read."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.distributed import get_tensor_model_parallel_world_size, tensor_model_parallel_all_reduce

from helmsight_vllm.answer import Answer
from helmsight_vllm.arrays import sent
from helmsight_vllm.attention import AttentionReader, method_of
from helmsight_vllm.layers import decoder_layers, extend, observe
from helmsight_vllm.looks import MapLook, Span
from helmsight_vllm.masks import chosen_by_picture
from helmsight_vllm.plan import Ints, Plan, plan_in
from helmsight_vllm.table import AdditionTable

KEPT = 1024
"""The number of ended answers whose measurements wait to be fetched."""


class Part(NamedTuple):
    """Consecutive tokens of one answer among chosen ones: `begin` to `end` of these, the first of them at `start`."""

    answer: Answer
    begin: int
    end: int
    start: int


@dataclass
class Chosen:
    """Tokens of a step: their rows (k,), and their parts by answer."""

    rows: torch.Tensor
    parts: list[Part]


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
        layers = decoder_layers(config.compilation_config.static_forward_context, runner.model)
        for number, (layer, _) in layers.items():
            extend(layer, number, self.table.rows[number], self._rows)
        attentions = {number: attention for number, (_, attention) in layers.items()}
        method = method_of(attentions, config, runner.device)
        self._reader = None if method is None else AttentionReader(attentions, method)
        self.steps = {"all": 0, "steered": 0}
        self._written = 0  # the number of rows that the last step wrote
        self.answers: dict[str, Answer | None] = {}  # by request; None for one without a plan
        self._ended: OrderedDict[str, Answer] = OrderedDict()
        self._failed: OrderedDict[str, str] = OrderedDict()
        self._steps: list[tuple[Answer, int]] = []  # the answers of a step, and where they will stand behind it
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
        rows = np.zeros(int(starts[batch.num_reqs]), np.int64)
        parts = []
        for place, request in enumerate(batch.req_ids[: batch.num_reqs]):
            answer = self._answer(request)
            if answer is not None:
                first, last = int(starts[place]), int(starts[place + 1])
                start = int(computed[place])
                parts.append((answer, place, first, start, start + last - first))
                if answer.steers:
                    rows[first:last] = answer.rows_at(start, start + last - first)
        self._write(rows)
        self.steps["all"] += 1
        self.steps["steered"] += bool(rows.any())
        self._steps = [(answer, stop) for answer, _, _, _, stop in parts]
        fresh = [(answer, first - start, max(start, answer.counted), stop) for answer, _, first, start, stop in parts]
        self._inverse = self._chosen(
            (answer, offset, new, min(stop, answer.plan.length))
            for answer, offset, new, stop in fresh
            if answer.plan.steered is not None
        )
        self._states = self._chosen(
            (answer, offset, max(new, _first_state(answer.plan)), stop)
            for answer, offset, new, stop in fresh
            if answer.plan.residual or answer.plan.state_position is not None
        )
        # A damped update is damped whenever it is computed.
        self._think = self._chosen(
            (answer, first - start, start, stop)
            for answer, _, first, start, stop in parts
            if answer.plan.think is not None
        )
        self._seen = []
        self._pictured, self._due = [], []
        if self._reader is not None:
            self._begin_reading(self._reader, parts)
            self._begin_maps(self._reader, parts)

    def end(self, output: Any) -> None:
        """Gather what the pass has shown; `output` is the model's, of which the first are the normalised last states."""
        for answer, rows, patches in self._pictured:
            last = output[0] if isinstance(output, tuple) else output
            answer.add_image_states(patches, last[torch.from_numpy(rows).to(last.device)].to("cpu", torch.float32))
        if self._reader is not None:
            self._reader.end()
        if self._states is not None and self._seen:
            states = torch.stack(self._seen).to("cpu", torch.float32)
            for answer, begin, end, start in self._states.parts:
                for place in range(begin, end):
                    answer.add_states(start + place - begin, states[:, place])
        for answer, stop in self._steps:
            answer.counted = max(answer.counted, stop)
        self._inverse = self._states = self._think = None
        self._before.clear()

    def make_masks(self, logits: torch.Tensor) -> None:
        """Make the masks that are due, of the pass's logits (answers, vocabulary) before any contrast."""
        for answer, place, tokens, look in self._due:
            try:
                states: Any = answer.image_states
                scores = self._runner.model.compute_logits(states.to(logits.device, self.table.rows.dtype))
                activation = scores[:, logits[place].argmax()].float().relu().cpu()
                attention = mean_over_ranks(look.sums / len(look.layers)).cpu()
                mask: Any = answer.plan.mask
                sizes = [len(image) for image in mask["images"]]
                answer.add_mask(tokens, chosen_by_picture(attention, activation, sizes, mask["top"]))
            except Exception as error:
                self._fail(answer.plan.number, error)
        self._due = []

    def mask(self, number: str, tokens: int) -> list[list[int]] | None:
        """Return an answer's mask from a generated token on; None where it is not made yet."""
        if number in self._failed:
            raise RuntimeError(self._failed[number])
        masks = [mask for answer in self.answers.values() if answer is not None and answer.plan.number == number
                 for mask in answer.masks]  # fmt: skip
        return next((mask["patches"] for mask in masks if mask["token"] == tokens), None)

    def take(self, number: str, fed: int) -> dict[str, Any] | None:
        """Return what was measured of an answer that has ended, and forget it; None where nothing is known of it."""
        self._forget()
        if (failure := self._failed.pop(number, None)) is not None:
            raise RuntimeError(f"The answer was not steered: {failure}")
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
        if self._think is not None:
            self._before[layer] = _stream(update, stream, self._think.rows)

    def leave(self, layer: int, update: torch.Tensor, stream: torch.Tensor | None) -> None:
        if self._think is not None and stream is not None:
            self._damp(self._think, layer, update, stream)
        if self._inverse is not None:
            inverse = 1 / _stream(update, stream, self._inverse.rows).norm(dim=-1)
            for answer, begin, end, start in self._inverse.parts:
                classes = torch.from_numpy(answer.plan.classes[start : start + end - begin])
                answer.inverse[layer].index_add_(0, classes, inverse[begin:end].cpu())
        if self._states is not None:
            rows = self._states.rows
            self._seen.append(_stream(update, stream, rows) + self.table.rows[layer, self._rows[rows]].float())

    def _damp(self, think: Chosen, layer: int, update: torch.Tensor, stream: torch.Tensor) -> None:
        ffn = update[think.rows].float()
        differs = divergence(stream[think.rows].float() - self._before.pop(layer), ffn)
        settings = [(end - begin, answer.plan.think or {}) for answer, begin, end, _ in think.parts]
        counts = torch.tensor([count for count, _ in settings])
        thresholds, gammas = (
            torch.tensor(values).repeat_interleave(counts).to(update.device)
            for values in zip(*((asked["thresholds"][layer], asked["gamma"]) for _, asked in settings), strict=True)
        )
        over = differs > thresholds
        update[think.rows] = (ffn * torch.where(over, gammas, 1.0)[:, None]).to(update.dtype)
        measured = torch.stack([over.float(), differs], -1).cpu()
        for answer, begin, end, start in think.parts:
            answer.add_thoughts(layer, start, measured[begin:end])

    # -- what a step needs ---------------------------------------------------------------------------------------------

    def _answer(self, request: str) -> Answer | None:
        if request not in self.answers:
            params = self._runner.requests[request].sampling_params
            self.answers[request] = None if params is None else self._placed(params.extra_args)
        return self.answers[request]

    def _placed(self, extra: Mapping[str, Any] | None) -> Answer | None:
        """Return the answer to a request with its rows of the table; None for one without a plan.

        One that cannot be planned is answered plainly, and `take` raises why: what is raised within a step ends the engine.
        """
        try:
            plan = Plan.of(extra)
            return None if plan is None else Answer(plan, self.table, self._layers, self._width)
        except Exception as error:
            self._fail(str((plan_in(extra) or {}).get("number")), error)
            return None

    def _fail(self, number: str, error: Exception) -> None:
        self._failed[number] = f"{type(error).__name__}: {error}"
        while len(self._failed) > KEPT:
            self._failed.popitem(last=False)

    def _write(self, rows: Ints) -> None:
        """Write the rows of a step's tokens; a step without any writes only where one before has."""
        used = len(rows) if rows.any() else 0
        count = max(used, self._written)
        if count:
            padded = np.zeros(count, np.int64)
            padded[:used] = rows[:used]
            self._rows[:count].copy_(torch.from_numpy(padded), non_blocking=True)
        self._written = used

    def _chosen(self, parts: Iterable[tuple[Answer, int, int, int]]) -> Chosen | None:
        """Return the tokens of parts (answer, offset of its rows against positions, first position, end)."""
        rows, chosen = list[int](), list[Part]()
        for answer, offset, start, stop in parts:
            if start < stop:
                chosen.append(Part(answer, len(rows), len(rows) + stop - start, start))
                rows += range(offset + start, offset + stop)
        return Chosen(torch.tensor(rows, device=self._rows.device), chosen) if rows else None

    def _begin_reading(self, reader: AttentionReader, parts: list[tuple[Answer, int, int, int, int]]) -> None:
        spans = [
            Span(answer, place, first, start, stop, answer.looks_at(max(start, answer.counted), stop))
            for answer, place, first, start, stop in parts
            if answer.plan.attention is not None
        ]
        if spans:
            width = max(answer.plan.attention.count for answer, *_ in parts if answer.plan.attention is not None)
            reader.begin(spans, self._layers, width)

    def _begin_maps(self, reader: AttentionReader, parts: list[tuple[Answer, int, int, int, int]]) -> None:
        for answer, place, first, start, stop in parts:
            patches = answer.patches_at(start, stop)
            if len(patches):
                self._pictured.append((answer, first - start + answer.image_columns[patches], patches))
            if answer.is_due(stop):
                mask = answer.plan.mask or {}
                columns = sent(answer.image_columns, reader.method.device)
                look = MapLook(place, first + stop - start - 1, stop, columns, mask["layers"])
                self._due.append((answer, place, stop - answer.plan.length, look))
        reader.maps = [look for *_, look in self._due]

    def _forget(self) -> None:
        """Release what requests hold that the runner no longer has."""
        for request in [request for request in self.answers if request not in self._runner.requests]:
            answer = self.answers.pop(request)
            if answer is None:
                continue
            answer.release()
            if answer.plan.leads and (answer.plan.reads or answer.plan.rule is not None) and not answer.fetched:
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


def _first_state(plan: Plan) -> int:
    """Return the first position whose states are read."""
    last = plan.length - 1
    return last if plan.state_position is None else min(last, plan.length + plan.state_position)


def _stream(update: torch.Tensor, stream: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor:
    """Return the residual stream of some tokens, (k, d) float32."""
    values = update[rows].float()
    return values if stream is None else values + stream[rows].float()
