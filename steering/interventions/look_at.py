"""LookAt adds a bias to the attention scores of an image's patches, or of those in a box.

s <- s + bias, before the softmax, in the columns of the patches, at chosen layers and heads. A softmax of shifted scores is
the plain weights w, times e^bias on the patches, normalised again. A prefill's output therefore follows from products of the
plain weights, as (R + e^bias P) / (r + e^bias p), with P and R the weighted values of the patches and of the rest, p and r
their shares of attention. Where heads have sinks, whose scores are not shifted, their share is a part of r. All are sums of
positive terms, so that nothing cancels, however large the bias.

The biased queries are those after the image's last patch: tokens of the prompt, and every generated one. With `queries`
"all" the patches' own queries are biased too, which changes the information that patches pass to each other.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from steering.decoder.hooks import AttentionHook, Product
from steering.devices import fill_slot, to_device
from steering.errors import Inapplicable, RequestError
from steering.model.mllm import MLLM
from steering.prompt.layout import ImageSpan, Prompt
from steering.protocol.intervention_spec import LayerList, Options, check_layers
from steering.protocol.sequence import Sequence
from steering.protocol.slots import DecodeBatch, Pool, PrefillChunk, Reuse, Slots
from steering.protocol.wording import counted, shown

NAME = "look_at"
Share = Annotated[float, Field(ge=0, le=1)]


class LookAt(Options):
    """Draw attention to a picture, or to a box in it.

    `bias` is added to the scores of its patches before the softmax, below 0 to look away. `image` counts from 1. `box` is
    [x0, y0, x1, y1] in shares of the picture's width and height from its upper left corner; every patch that it overlaps
    counts. `layers` default to the middle third of those with softmax attention, `heads` to all. `queries` are the tokens
    `behind` the picture, generated ones included, or `all`. Raises RequestError for values out of range.
    """

    path = (NAME,)
    needs_image = True

    image: int = Field(1, ge=1, le=1024)
    box: list[Share] | None = Field(None, min_length=4, max_length=4)
    bias: float = Field(1.0, ge=-20, le=20)
    layers: LayerList | None = None
    heads: list[Annotated[int, Field(ge=0)]] | None = Field(None, max_length=1024)
    queries: Literal["behind", "all"] = "behind"

    def check(self, mllm: MLLM, prompt: Prompt) -> None:
        check_layers(self.layers, mllm.attention_layers, "look_at.layers")
        heads = mllm.text_config.num_attention_heads
        different = self.heads is None or len({*self.heads}) == len(self.heads)
        if self.heads is not None and not (different and self.heads and {*self.heads} <= {*range(heads)}):
            raise RequestError(
                f"'look_at.heads' must be different numbers of heads from 0 to {heads - 1}; got {shown(self.heads)}.",
                param="look_at.heads",
            )
        images = prompt.layout.images
        if self.image > len(images):
            raise Inapplicable(
                f"'look_at.image' is {self.image}, but the request holds {counted(len(images), 'image')}.",
                param="look_at.image",
            )
        if self.box is None:
            return
        x0, y0, x1, y1 = self.box
        if x0 >= x1 or y0 >= y1:
            raise RequestError(
                f"'look_at.box' must be [x0, y0, x1, y1] with x0 < x1 and y0 < y1; got {shown(self.box)}.",
                param="look_at.box",
            )
        if images[self.image - 1].grid is None:
            raise Inapplicable(
                f"'look_at.box' needs a single grid of patches, but {mllm.name} cuts this image into tiles; leave the "
                "box out to look at the whole image.",
                param="look_at.box",
            )

    def columns(self, prompt: Prompt) -> torch.Tensor:
        """Return the prompt's columns that are looked at, (patches,).

        They are empty where the prompt lacks the image, as a twin's may.
        """
        images = prompt.layout.images
        if self.image > len(images):
            return torch.zeros(0, dtype=torch.int64)
        image = images[self.image - 1]
        return image.columns if self.box is None else image.columns[inside(self.box, image)]

    def chosen_layers(self, mllm: MLLM) -> list[int]:
        """Return the layers where scores are biased: by default the middle third of those with softmax attention."""
        attending = mllm.attention_layers
        first = len(attending) // 3
        middle = attending[first : max(first + 1, 2 * len(attending) // 3)]
        return list(middle) if self.layers is None else self.layers

    def first_query(self, prompt: Prompt) -> int:
        """Return the first token of the prompt whose query is biased."""
        images = prompt.layout.images
        behind = self.queries == "behind" and self.image <= len(images)
        return int(images[self.image - 1].columns.max()) + 1 if behind else 0

    def report(self, measured: Any) -> dict[str, Any]:
        """Report the settings, layers, heads and the number of patches.

        measured: the number of patches, the layers, and the heads.
        """
        patches, layers, heads = measured
        return {**self.settings(), "layers": layers, "heads": heads, "patches": patches}


def inside(box: list[float], image: ImageSpan) -> torch.Tensor:
    """Return which patches of an image a box overlaps, (tokens,) bool, row by row of its grid.

    box: [x0, y0, x1, y1] in shares of the image's sides.
    """
    assert image.grid is not None
    (rows, columns), (x0, y0, x1, y1) = image.grid, box
    down, right = torch.arange(rows)[:, None], torch.arange(columns)[None]
    overlaps = (down < y1 * rows) & (down + 1 > y0 * rows) & (right < x1 * columns) & (right + 1 > x0 * columns)
    return overlaps.flatten()


class LookAtRows(AttentionHook):
    """The bias of one forward pass.

    asked: (rows,) bool. bias: (rows, layers, heads), 0 where nothing is added. patches: (rows, length), 1 on the columns
    that are looked at. layers: those where any row is biased. places: (rows, n), in a prefill, the column of each query;
    first: (rows, 1), the first biased query.
    """

    def __init__(
        self,
        asked: torch.Tensor,
        bias: torch.Tensor,
        patches: torch.Tensor,
        layers: tuple[int, ...],
        places: torch.Tensor | None = None,
        first: torch.Tensor | None = None,
    ):
        self.asked = asked[:, None, None, None]
        self._bias, self._patches, self._layers = bias, patches, layers
        self._biased = None if places is None or first is None else (places >= first).float()  # (rows, n)

    def scores(self, layer: int, scores: torch.Tensor, queries: torch.Tensor | None) -> torch.Tensor:
        if (bias := self.bias(layer)) is None:
            return scores
        by_head, patches = bias
        added = by_head[..., None, None] * patches[:, None, None, : scores.shape[-1]]
        if queries is not None and self._biased is not None:
            added = added * self._biased.gather(1, queries)[:, None, :, None]
        return scores + added.to(scores.device)

    def bias(self, layer: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return what is added by head (rows, heads), and the columns to which it is, (rows, length); None for nothing."""
        return (self._bias[:, layer], self._patches) if layer in self._layers else None

    def product(self, layer: int, value: torch.Tensor, exact: Product) -> torch.Tensor | None:
        if self._biased is None or layer not in self._layers:
            return None
        device = value.device
        patches = self._patches[:, None, : value.shape[2], None].to(device)  # (rows, 1, columns, 1)
        bias = self._bias[:, layer, :, None, None] * self._biased[:, None, :, None]  # (rows, heads, n, 1)
        factor = bias.exp().to(device)
        value = value.float()
        plain = exact(value)
        at, elsewhere = exact(value * patches), exact(value * (1 - patches))
        shares = torch.zeros_like(value)
        shares[..., :1], shares[..., 1:2] = patches, 1 - patches
        share, elsewhere_share = exact(shares)[..., :2].split(1, -1)
        if (of_sinks := exact.of_sinks()) is not None:
            elsewhere_share = elsewhere_share + of_sinks
        biased = (elsewhere + factor * at) / (elsewhere_share + factor * share)
        return torch.where(factor != 1, biased, plain)


class LookAtSlots(Slots):
    """The bias of every slot.

    asked: (slots,) bool. bias: (slots, layers, heads), of this rank's heads, 0 where nothing was requested. patches: (slots,
    length), 1 on the columns that are looked at. first: (slots, 1), the first query.
    """

    def __init__(self, name: str, pool: Pool):
        super().__init__(name, pool)
        slots, device, ranks = pool.slots, pool.device, pool.mllm.ranks
        self._heads = pool.mllm.text_config.num_attention_heads
        local_heads = self._heads // ranks.size
        self._local = slice(ranks.rank * local_heads, (ranks.rank + 1) * local_heads)
        self.asked = torch.zeros(slots, dtype=torch.bool, device=device)
        self.bias = torch.zeros(slots, pool.layers, local_heads, device=device)
        self.patches = torch.zeros(slots, pool.length, device=device)
        self.first = torch.zeros(slots, 1, dtype=torch.int64, device=device)

    def place(self, sequence: Sequence) -> None:
        slot, look, prompt = sequence.slot, _options(sequence), sequence.prompt
        fill_slot(
            self.asked, slot, look is not None and look.bias != 0
        )  # a bias of 0 must leave the row's bits unchanged
        bias, patches = torch.zeros(self.pool.layers, self._heads), torch.zeros(self.pool.length)
        if look is not None:
            layers = torch.tensor(look.chosen_layers(self.pool.mllm))
            heads = torch.arange(self._heads) if look.heads is None else torch.tensor(look.heads)
            bias[layers[:, None], heads] = look.bias
            patches[look.columns(prompt)] = 1
        self.bias[slot] = to_device(bias[:, self._local], self.bias)
        self.patches[slot] = to_device(patches, self.patches)
        fill_slot(self.first, slot, 0 if look is None else look.first_query(prompt))

    def prefill(self, chunk: PrefillChunk) -> LookAtRows | None:
        starts = to_device(torch.tensor(chunk.starts), self.first.device)
        places = starts[:, None] + torch.arange(chunk.width, device=starts.device)
        return self._rows(chunk.rows, chunk.sequences, places)

    def reuse(self, sequence: Sequence) -> Reuse:
        look = _options(sequence)
        if look is None or not look.bias:
            return Reuse(sequence.prompt.length)
        key = (look.bias, look.image, look.box and tuple(look.box), look.queries)
        heads = None if look.heads is None else tuple(sorted(look.heads))
        return Reuse(sequence.prompt.length, (*key, tuple(look.chosen_layers(self.pool.mllm)), heads))

    def acts(self, sequences: list[Sequence]) -> bool:
        return any(_options(sequence) is not None for sequence in sequences)

    def decode(self, batch: DecodeBatch) -> LookAtRows | None:
        return self._rows(batch.rows, batch.sequences, None)

    def take(self, sequence: Sequence) -> tuple[int, list[int], list[int]] | None:
        look = _options(sequence)
        if look is None:
            return None
        heads = list(range(self._heads)) if look.heads is None else look.heads
        return len(look.columns(sequence.prompt)), look.chosen_layers(self.pool.mllm), heads

    def _rows(self, rows: slice, sequences: list[Sequence], places: torch.Tensor | None) -> LookAtRows | None:
        looks = [look for sequence in sequences if (look := _options(sequence)) is not None and look.bias]
        if not looks:
            return None
        layers = {layer for look in looks for layer in look.chosen_layers(self.pool.mllm)}
        return self.rows(rows, tuple(sorted(layers)), places)

    def rows(self, rows: slice, layers: tuple[int, ...], places: torch.Tensor | None = None) -> LookAtRows:
        """Return the bias of some slots, in which no row may be biased."""
        return LookAtRows(self.asked[rows], self.bias[rows], self.patches[rows], layers, places, self.first[rows])


def _options(sequence: Sequence) -> LookAt | None:
    look = sequence.spec.asked.get(NAME)
    return look if isinstance(look, LookAt) else None
