"""SAGE's first stage, See: attention to images is enhanced (SAGE paper, section 5.1, equations 3 and 4).

The formula is lost in the paper's text; readings of it are here. The sentence after it names a_v, a_s and a_u, the attention
to the images, to the system prompt and to the user's, so that any formula that the sum of a row's weights enters uses all
three: it does not settle the reading. For a row in a layer with enhancement alpha, m_v and m_t are its attention to the
images and to the rest of the prompt:

- "transfer", the default: a share alpha of m_t moves to the images, in proportion to the weights inside them;
- "scale": visual weights times (1 + alpha), then the row is normalised again;
- "add": visual weights times (1 + alpha), and the row is left as it is, so that its weights sum to 1 + alpha * m_v.

Where heads have sinks, what goes to them is a part of the row: "scale" normalises it, too, and "transfer" leaves it.

The rest of the prompt is all of it, template included, as in the authors' scripts, or with `spans` "content" the messages'
texts alone. `source` limits it further: "system" is what stands before the first image (a_s), "user" all other text (a_u).

Shallow layers have the fixed alpha, in every row. Deeper ones have alpha * clip(decay, 0, ceiling) in the rows of generated
tokens, decay = 1 - m_v(t) / m_v(1), where t = 1 is the prompt's last row.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
from pydantic import Field

from steering.decoder.hooks import AttentionHook, Hook, Product
from steering.decoder.ranks import ALONE, Ranks
from steering.devices import fill_slot, to_device
from steering.errors import RequestError
from steering.measures import spread
from steering.model.mllm import MLLM
from steering.prompt.layout import Prompt
from steering.prompt.spans import FIRST_IMAGE, SYSTEM
from steering.protocol.intervention_spec import LAYERS, Options
from steering.protocol.sequence import Sequence
from steering.protocol.signals import Signal
from steering.protocol.slots import Computed, DecodeBatch, Pool, PrefillChunk, Reuse, Slots
from steering.protocol.wording import shown
from steering.recorders import attention, spans

NAME = "sage.see"
Reading = Literal["scale", "transfer", "add"]
Source = Literal["all", "system", "user"]
READINGS: tuple[Reading, ...] = get_args(Reading)
SCALE, TRANSFER, ADD = range(len(READINGS))
LEAST = torch.finfo(torch.float32).tiny
"""The least attention to images that can be divided by; anything less counts as none."""


class See(Options):
    """Enhance attention to the images (SAGE's See).

    `alpha` is the share by which attention is enhanced. In `shallow` layers, counted from the first, it is fixed (None: the
    model's first quarter); in deeper ones it grows with the decay of attention to the images since the first token, up to
    `ceiling`. `reading` "transfer" moves the share from the rest of the prompt, "scale" multiplies by 1 + alpha and
    normalises again, "add" multiplies alone; `spans` tells whether that rest is the "whole" prompt or its "content",
    `source` ("from" in a request) of which part "transfer" takes: "all", "system" or "user". SAGE paper, section 5.1,
    equations 3 and 4. Raises RequestError for invalid values.
    """

    path = ("sage", "see")
    needs_image = True
    rehearsed: ClassVar[bool] = True

    alpha: float = Field(0.1, ge=0, le=1)
    reading: Reading = "transfer"
    shallow: int | None = Field(None, ge=0, json_schema_extra={LAYERS: 0})
    ceiling: float = Field(1.0, ge=0, le=1)
    spans: Literal["whole", "content"] = "whole"
    source: Source = Field("all", alias="from")

    @property
    def signals(self) -> frozenset[Signal]:
        return frozenset({Signal.LAST})

    def check(self, mllm: MLLM, prompt: Prompt) -> None:
        self.depth(mllm.num_layers)

    def depth(self, layers: int) -> int:
        """Return the number of a model's shallow layers; raise RequestError where it has fewer than requested."""
        if self.shallow is not None and self.shallow > layers:
            raise RequestError(
                f"'sage.see.shallow' must be from 0 to {layers}, the model's layers; got {shown(self.shallow)}.",
                param="sage.see.shallow",
            )
        return max(1, layers // 4) if self.shallow is None else self.shallow

    def report(self, measured: Any) -> dict[str, Any]:
        """Report the enhancement and the mean attention to images before and after it.

        measured: (tokens, 4) as `SeeSlots.steps`, a row for each generated token that went through the model.
        """
        mean, greatest, before, after = measured.T.tolist() if len(measured) else ([], [], [], [])
        rounded = torch.tensor(self.alpha, dtype=measured.dtype).item() if len(measured) else self.alpha
        mean, greatest = ([self.alpha if alpha == rounded else alpha for alpha in some] for some in (mean, greatest))
        return {
            "reading": self.reading,
            "spans": self.spans,
            "from": self.source,
            "alpha": mean,
            "alpha_max": greatest,
            "share_before": sum(before) / len(before) if before else None,
            "share_after": sum(after) / len(after) if after else None,
        }

    def brief(self, report: dict[str, Any]) -> dict[str, Any]:
        return report | {name: spread(report[name]) for name in ("alpha", "alpha_max")}


class _Tables(NamedTuple):
    """The tensors that the enhancement of a forward pass needs on a layer's device.

    fixed, start, fall, most: (rows, layers).
    """

    masks: torch.Tensor
    visual: torch.Tensor
    text: torch.Tensor
    fixed: torch.Tensor
    reading: torch.Tensor
    start: torch.Tensor
    fall: torch.Tensor
    most: torch.Tensor
    zero: torch.Tensor
    one: torch.Tensor


class SeeRows(AttentionHook):
    """The enhancement of one forward pass.

    asked: (rows,) bool, the rows that requested it. masks: (rows, length, 2), 1 on the columns of images, and of the rest
    of the prompt. fixed, adaptive: (rows, layers), alpha of shallow and of deeper layers, 0 elsewhere. first: (rows,
    layers), m_v(1). ceiling: (rows,). reading: (rows,) uint8, an index of READINGS, None where every row scales. depths:
    the number of layers that are shallow in any row, and in every row. generated: whether the rows are generated tokens,
    whose decay is measured, or prompts. ranks: the processes with the other heads. apart: whether any column of a prompt
    belongs neither to an image nor to the rest. Once settled, `measured` is the effect on generated tokens, as returned by
    `measured_of`, unless it was already written to `steps` (rows, length, 4).
    """

    measured: torch.Tensor | None = None
    steps: torch.Tensor | None = None

    def __init__(
        self,
        asked: torch.Tensor,
        masks: torch.Tensor,
        fixed: torch.Tensor,
        adaptive: torch.Tensor,
        first: torch.Tensor,
        ceiling: torch.Tensor,
        reading: torch.Tensor | None,
        depths: tuple[int, int],
        generated: bool,
        ranks: Ranks = ALONE,
        apart: bool = True,
    ):
        self.asked = asked[:, None, None, None]
        self.depth, self._common_depth = depths
        self.generated = generated
        self._ranks = ranks
        self._inputs = masks, fixed, adaptive, first, ceiling, reading
        self._scales, self._apart = reading is None, apart and reading is not None
        self._tables: dict[torch.device, _Tables] = {}
        self._effects: list[tuple[torch.Tensor, ...]] = []  # by layer: alpha, m_v, and the factors

    def _make_tables(self, columns: int) -> _Tables:
        """Return everything that does not depend on a layer's attention, made once because a decode step is short."""
        masks, fixed, adaptive, first, ceiling, reading = self._inputs
        masks = masks[:, :columns]
        visual, text = (mask.contiguous() for mask in masks[:, None, None].unbind(-1))
        # alpha * clip(1 - m_v(t) / m_v(1), 0, ceiling) = clip(alpha - m_v(t) * alpha / m_v(1), 0, alpha * ceiling)
        has_images = first > 0  # a layer whose window held no image has no decay
        return _Tables(
            masks if reading is not None else masks[..., :1],  # "scale" does not need the sums over text
            visual,
            text,
            fixed,
            torch.full_like(ceiling, SCALE) if reading is None else reading[:, None, None, None],
            adaptive * has_images,
            torch.where(has_images, -adaptive / first, 0.0),
            adaptive * ceiling[:, None],
            torch.zeros((), device=masks.device),
            torch.ones((), device=masks.device),
        )

    def _tables_on(self, device: torch.device, columns: int) -> _Tables:
        if device not in self._tables:
            home = next(iter(self._tables.values()), None) or self._make_tables(columns)
            self._tables[device] = _Tables(*[table.to(device) for table in home])
        return self._tables[device]

    def weights(self, layer: int, weights: torch.Tensor) -> torch.Tensor:
        """Return the enhanced weights of shallow layers, and of deeper ones where the queries are generated tokens."""
        if not self.generated and layer >= self.depth:
            return weights
        n, columns = weights.shape[2:]
        tables = self._tables_on(weights.device, columns)
        masses = (weights[:, :, 0] @ tables.masks)[:, :, None] if n == 1 else weights @ tables.masks[:, None]
        image_mass = masses[..., :1]
        alpha = self._alpha(tables, layer, image_mass)
        up, down, total = self._factors(tables, alpha, image_mass, masses[..., 1:])
        if self.generated and self.queries is None:
            self._effects.append(tuple(value.to(self.asked.device) for value in (alpha, image_mass, up, total)))
        gain = torch.addcmul(tables.one, up, tables.visual)
        if down is not None:
            gain = torch.addcmul(gain, down, tables.text, value=-1)
        return (weights * gain).div_(total)

    def tables(self, columns: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return masks, settings (rows, layers, 4) and the reading (rows,).

        alpha is the first setting plus the second + the third * m_v, which is clamped between 0 and the fourth.
        """
        masks, fixed, _, _, _, reading = self._inputs
        tables = self._make_tables(columns)
        settings = torch.stack([fixed, tables.start, tables.fall, tables.most], -1)
        if reading is None:
            reading = torch.full_like(self.asked[:, 0, 0, 0], SCALE, dtype=torch.uint8)
        return masks.contiguous(), settings, reading

    def _alpha(self, tables: _Tables, layer: int, image_mass: torch.Tensor) -> torch.Tensor:
        """Return alpha, (rows, n or 1)."""
        if not self.generated or layer < self._common_depth:
            return tables.fixed[:, layer, None]
        decay = self._ranks.mean(image_mass.mean((1, 3)))
        deep = torch.addcmul(tables.start[:, layer, None], decay, tables.fall[:, layer, None])
        deep = deep.clamp_(tables.zero, tables.most[:, layer, None])
        return deep if layer >= self.depth else tables.fixed[:, layer, None] + deep

    def product(self, layer: int, value: torch.Tensor, exact: Product) -> torch.Tensor | None:
        """Return a shallow layer's output, with m_v and m_t as products of the weights, in float32 for small divisors."""
        if self.generated or layer >= self.depth:
            return None
        tables = self._tables_on(value.device, value.shape[2])
        value, masks = value.float(), tables.masks[:, None]
        plain, visual = exact(value), exact(value * masks[..., :1])
        indicators = torch.zeros_like(value)
        indicators[..., : masks.shape[-1]] = masks
        image_mass, text_mass = exact(indicators)[..., :2].split(1, -1)
        # Unless some are apart, every column that is no image's is text.
        text = exact(value * masks[..., 1:]) if self._apart else plain - visual
        up, down, total = self._factors(tables, tables.fixed[:, layer, None], image_mass, text_mass)
        more = up * visual if down is None else up * visual - down * text
        return (plain + more) / total

    def _factors(
        self, tables: _Tables, alpha: torch.Tensor, image_mass: torch.Tensor, text_mass: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Return the shares by which visual weights rise and text weights fall, and the divisor that normalises the row.

        alpha: (rows, n or 1). image_mass, text_mass: (rows, heads, n, 1), m_v and m_t. A row without an image is unchanged.
        """
        alpha = alpha[:, None, :, None]
        if self._scales:
            return alpha, None, torch.addcmul(tables.one, alpha, image_mass)
        return factors(alpha, image_mass, text_mass, tables.reading)

    def settle(self, positions: torch.Tensor | None) -> None:
        effects, self._effects, self._tables = self._effects, [], {}
        if not effects:
            return
        alpha, image_mass, up, total = (torch.stack(values, 1) for values in zip(*effects, strict=True))
        after = image_mass * (1 + up) / total
        image_mass, after = self._ranks.mean(torch.stack([image_mass.mean((2, 3, 4)), after.mean((2, 3, 4))]))
        self.measured = measured_of(alpha[..., 0], image_mass, after)


def factors(
    alpha: torch.Tensor, image_mass: torch.Tensor, text_mass: torch.Tensor, reading: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what `SeeRows._factors` does; image_mass is m_v, text_mass m_t, reading an index of READINGS; all broadcast."""
    transfer = reading == TRANSFER
    moved = alpha * (image_mass >= LEAST)
    up = torch.where(transfer, moved * text_mass / image_mass.clamp(min=LEAST), alpha)
    return up, moved * transfer, torch.where(reading == SCALE, 1 + alpha * image_mass, 1.0)


def measured_of(alpha: torch.Tensor, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Return (rows, 4): alpha, its mean and maximum over layers, and the mean mass on images before and after.

    alpha, before, after: (rows, layers).
    """
    return torch.stack([alpha.mean(1), alpha.amax(1), before.mean(1), after.mean(1)], -1)


class SeeSlots(Slots):
    """The settings of every slot, and the attention of each generated token to images.

    asked: (slots,) bool. masks: (slots, length, 2), 1 on the columns of images, and of the rest of the prompt. fixed,
    adaptive: (slots, layers), alpha of shallow and of deeper layers. first: (slots, layers), m_v(1). ceiling, reading:
    (slots,). steps: (slots, length, 4), by column alpha, its mean and maximum over layers, and m_v before and after.
    """

    measured: ClassVar[tuple[str, ...]] = ("first",)

    def __init__(self, name: str, pool: Pool):
        super().__init__(name, pool)
        slots, length, layers, device = pool.slots, pool.length, pool.layers, pool.device
        self.asked = torch.zeros(slots, dtype=torch.bool, device=device)
        self.masks = torch.zeros(slots, length, 2, device=device)
        self.fixed = torch.zeros(slots, layers, device=device)
        self.adaptive = torch.zeros(slots, layers, device=device)
        self.first = torch.zeros(slots, layers, device=device)
        self.ceiling = torch.zeros(slots, device=device)
        self.reading = torch.zeros(slots, dtype=torch.uint8, device=device)
        self.steps = torch.zeros(slots, length, 4, device=device)
        self._attending = (torch.tensor(pool.mllm.attention_layers, device=device),)  # a tensor would be of slots

    def place(self, sequence: Sequence) -> None:
        slot, see, spans = sequence.slot, sequence.spec.asked.get(NAME), sequence.prompt.layout.spans
        for tensor in vars(self).values():
            if isinstance(tensor, torch.Tensor):
                fill_slot(tensor, slot, 0)
        if not isinstance(see, See):
            return
        fill_slot(self.asked, slot, see.alpha > 0)  # an alpha of 0 must leave the row's bits unchanged
        depth = see.depth(self.pool.layers)
        image = spans >= FIRST_IMAGE
        text = ~image if see.spans == "whole" else (spans >= SYSTEM) & ~image
        if see.source != "all":
            before = image.cumsum(0) == 0
            text &= before if see.source == "system" else ~before
        self.masks[slot, : len(spans)] = to_device(torch.stack([image, text], -1), self.masks)
        self.fixed[slot, :depth] = see.alpha
        self.adaptive[slot, depth:] = see.alpha
        fill_slot(self.ceiling, slot, see.ceiling)
        fill_slot(self.reading, slot, READINGS.index(see.reading))

    def prefill(self, chunk: PrefillChunk) -> SeeRows | None:
        if not self.acts(chunk.sequences):
            return None
        rows = self._rows(chunk.rows, chunk.sequences, generated=chunk.replay)
        if chunk.replay:
            every = torch.arange(chunk.width, device=self.first.device).expand(len(chunk.sequences), -1)
            rows.queries = torch.where(rows.asked[:, 0, 0], every, -1)
        return rows

    def reuse(self, sequence: Sequence) -> Reuse:
        see = sequence.spec.asked.get(NAME)
        key = (
            (see.alpha, see.reading, see.spans, see.source, see.depth(self.pool.layers)) if isinstance(see, See) else ()
        )
        return Reuse(sequence.prompt.length, key)

    def keep(self, chunk: PrefillChunk, hook: Hook | None, computed: Computed) -> None:
        if not isinstance(hook, SeeRows) or chunk.replay:
            return
        for sequence in chunk.sequences:
            captured = sequence.captured.get(attention.NAME)
            if NAME in sequence.spec.asked and captured is not None and captured.last_sums is not None:
                at, attended = self._attending[0], spans.image_sums(captured.last_sums).sum(-1)
                self.first[sequence.slot].index_copy_(0, at, attended)

    def acts(self, sequences: list[Sequence]) -> bool:
        return any(NAME in sequence.spec.asked for sequence in sequences)

    def depths(self, sequences: list[Sequence]) -> list[int]:
        return [see.depth(self.pool.layers) for see in _options(sequences)]

    def decode(self, batch: DecodeBatch) -> SeeRows:
        return self._rows(batch.rows, batch.sequences, generated=True)

    def record(self, batch: DecodeBatch, hook: Hook | None, computed: Computed) -> None:
        if isinstance(hook, SeeRows) and hook.steps is None and hook.measured is not None:
            self.steps.index_put_(batch.written, hook.measured)

    def take(self, sequence: Sequence) -> torch.Tensor | None:
        """Return the rows of `steps`, (tokens, 4), of the generated tokens that were fed."""
        first = sequence.prompt.length
        steps = self.steps[sequence.slot, first : first + sequence.fed]
        return steps.to("cpu", copy=True) if NAME in sequence.spec.asked else None

    def _rows(self, slots: slice, sequences: list[Sequence], generated: bool) -> SeeRows:
        sees, depths = _options(sequences), self.depths(sequences)
        return self.rows(
            slots,
            (max(depths), min(depths)),
            generated,
            scales=all(see.reading == "scale" for see in sees),
            apart=any(see.spans == "content" or see.source != "all" for see in sees),
        )

    def rows(
        self, slots: slice, depths: tuple[int, int], generated: bool, scales: bool = False, apart: bool = True
    ) -> SeeRows:
        """Return the enhancement of a range of slots.

        depths, generated, apart: as of `SeeRows`. scales: whether every reading is "scale".
        """
        settings = self.asked, self.masks, self.fixed, self.adaptive, self.first, self.ceiling
        reading = None if scales else self.reading[slots]
        asked, masks, fixed, adaptive, first, ceiling = (tensor[slots] for tensor in settings)
        ranks = self.pool.mllm.ranks
        return SeeRows(asked, masks, fixed, adaptive, first, ceiling, reading, depths, generated, ranks, apart)


def _options(sequences: list[Sequence]) -> list[See]:
    return [see for sequence in sequences if isinstance(see := sequence.spec.asked.get(NAME), See)]
