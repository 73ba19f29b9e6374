"""Attention by plain torch over a backend's paged keys, for the chosen rows only: no kernel is called.

Behind a backend's own work, the keys of looked answers are gathered by their block tables, in padded batches of answers, and
weights are computed as the backend does: scale, soft cap, causality and window by positions, softmax in float32 with sinks.
Everything stays on the device until the reader's `end`: nothing here waits for it.

What is known of a backend is in `BACKENDS`, `_window` and `_blocks`; vLLM 0.31 to 0.33 have one logical form of the cache,
(blocks, heads, block, 2 * width) with keys before values, whatever its strides are (NHD and HND; the layers' blocks side by
side). `weights` is arithmetic alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from vllm.model_executor.layers.attention import Attention

from helmsight_vllm.arrays import sent
from helmsight_vllm.kernel import DTYPES, halves
from helmsight_vllm.looks import Look, MapLook, Pass, Span
from helmsight_vllm.plan import NONE, Ints

BUDGET = 2**25
"""The most elements of a batch's scores and keys together (128 MiB as float32), unless one row's keys alone are more."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def _first_half(cache: torch.Tensor, width: int) -> torch.Tensor:
    """Return the keys of backends that keep each token's key before its value."""
    return cache[..., :width]


def _columns(cache: torch.Tensor, width: int) -> torch.Tensor:
    """Return the keys of vLLM's kernel for CPUs, which keeps those of a block as columns."""
    keys, _ = halves(cache)
    return keys.flatten(2).unflatten(2, (width, -1)).transpose(2, 3)


BACKENDS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "FlashAttentionImpl": _first_half,
    "TritonAttentionImpl": _first_half,
    "FlashInferImpl": _first_half,
    "CPUAttentionBackendImpl": _columns,
}
"""By a backend's class, views of a layer's keys, (blocks, key heads, block, width)."""
COLUMNS = ("vec", "vec16")
"""The instruction sets of CPUs whose kernels keep keys as columns of single numbers; others interleave them."""


def readable(attention: Any) -> bool:
    """Return True for attention of a backend whose keys are plain and those of whole answers on this rank.

    Not readable are subclasses of vLLM's layer, which regroup the batch, and of backends, which keep keys otherwise, such as
    MLA's; quantised caches; ALiBi; and caches that are spread over ranks by context.
    """
    impl = attention.impl
    spread = any(getattr(impl, name, 1) > 1 for name in ("dcp_world_size", "pcp_world_size"))
    known = type(attention) is Attention and type(impl).__name__ in BACKENDS
    return known and impl.kv_cache_dtype in DTYPES and impl.alibi_slopes is None and not spread


def whole_batches(config: Any) -> bool:
    """Return True where a layer's queries are those of the whole batch, and a row sees all tokens or a window of them."""
    split = config.parallel_config.use_ubatching or config.cache_config.kv_sharing_fast_prefill
    return not split and config.model_config.rswa_window is None


@dataclass
class Padded:
    """Looked rows of several answers, padded to the most rows of one and the longest.

    rows: (answers, rows) in the step. positions: theirs. places: (answers,) in the runner's batch. results, taken: (k,),
    where rows that are no padding stand among the results, and here, flattened. span: the most tokens that a row sees.
    labels: (answers, prompts' tokens, labels), one-hot.
    """

    rows: torch.Tensor
    positions: torch.Tensor
    places: torch.Tensor
    results: torch.Tensor
    taken: torch.Tensor
    labels: torch.Tensor
    span: int
    _kept: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    def unseen(self, keys: int, window: int) -> torch.Tensor:
        """Return `hidden` of the rows. That of single rows is kept for all layers; a whole prompt's would be too large."""
        if self.rows.shape[1] > 1:
            return hidden(self.positions, keys, window)
        if (keys, window) not in self._kept:
            self._kept[keys, window] = hidden(self.positions, keys, window)
        return self._kept[keys, window]


calls = {"layers": 0}
"""The number of times that weights were computed from a layer's paged keys in this process."""


class Piece(NamedTuple):
    """Consecutive rows of a look that are read together; `result`: the first one's place among the results."""

    look: Look
    start: int
    stop: int
    result: int


class PagedMethod:
    """Reads attention from the paged keys of these layers."""

    def __init__(self, layers: Iterable[Any], device: torch.device):
        self.device = device
        self._layers = list(layers)
        impls = [layer.impl for layer in self._layers]
        self._heads = max(impl.num_heads for impl in impls)
        self._key = max(impl.num_kv_heads * impl.head_size for impl in impls)
        self._batches: list[Padded] = []
        self._tables: dict[tuple[int, int], list[torch.Tensor]] = {}  # blocks of batches, by metadata and block size
        self._whole: dict[int, torch.Tensor] = {}  # one-hot labels of the step's answers
        for layer in self._layers:
            if _backend(layer.impl) == "FlashInferImpl":
                keep_blocks(layer.attn_backend.get_builder_cls())

    def plain(self) -> bool:
        """Return True where every cache has the form that its backend's class stands for."""
        return all(map(_is_plain, self._layers))

    def begin(self, spans: Sequence[Span], looks: Sequence[Look], width: int) -> None:
        self._width, self._tables, self._whole = width, {}, {}
        pieces = list(pieces_of(looks, BUDGET // self._heads))
        groups = list(batches_of(pieces, lambda rows, span: span * (rows * self._heads + self._key + width)))
        arrays = [array for group in groups for array in _indices(group)]
        if not arrays:
            self._batches = []
            return
        parts = sent(np.concatenate(arrays), self.device).split([len(array) for array in arrays])
        self._batches = [self._batch(group, *parts[5 * at : 5 * at + 5]) for at, group in enumerate(groups)]

    def sum_into(self, sums: torch.Tensor, of: Pass) -> None:
        key = id(of.meta), of.cache.shape[2]
        if key not in self._tables:
            self._tables[key] = [_table(of, padded.places, padded.span) for padded in self._batches]
        for padded, blocks in zip(self._batches, self._tables[key], strict=True):
            unseen = padded.unseen(blocks.shape[1] * of.cache.shape[2], _window(of.impl))
            found = self._weights(of, of.query[padded.rows], blocks, unseen)
            by_label = found[..., : padded.labels.shape[1]] @ padded.labels
            sums.index_copy_(0, padded.results, by_label.flatten(0, 1)[padded.taken])

    def map(self, look: MapLook, of: Pass) -> torch.Tensor:
        blocks = _table(of, slice(look.place, look.place + 1), look.length)
        position = torch.full((1, 1), look.length - 1, device=self.device)
        unseen = hidden(position, blocks.shape[1] * of.cache.shape[2], _window(of.impl))
        return self._weights(of, of.query[look.row][None, None], blocks, unseen)[0, 0, look.columns]

    def _weights(self, of: Pass, query: torch.Tensor, blocks: torch.Tensor, unseen: torch.Tensor) -> torch.Tensor:
        calls["layers"] += 1
        keys = BACKENDS[_backend(of.impl)](of.cache, of.impl.head_size)
        return weights(query, keys[blocks], unseen, of.impl.scale, of.impl.logits_soft_cap or 0.0, of.impl.sinks)

    def _batch(
        self, group: Sequence[Piece], rows: torch.Tensor, positions: torch.Tensor, places: torch.Tensor,
        results: torch.Tensor, taken: torch.Tensor,
    ) -> Padded:  # fmt: skip
        span = max(piece.stop for piece in group)
        answers = [piece.look.answer for piece in group]
        if len(group) > 1:
            own = [answer.labels_on(self.device)[:span] for answer in answers]
            labels = self._one_hot(pad_sequence(own, batch_first=True, padding_value=float(NONE)))
        else:  # one of the many pieces of a long prompt, perhaps
            key = id(answers[0])
            if key not in self._whole:
                self._whole[key] = self._one_hot(answers[0].labels_on(self.device))
            labels = self._whole[key][None, :span]
        shape = len(group), -1
        return Padded(rows.view(shape), positions.view(shape), places, results, taken, labels, span)

    def _one_hot(self, labels: torch.Tensor) -> torch.Tensor:
        return (labels[..., None] == torch.arange(self._width, device=self.device)).float()


def weights(
    query: torch.Tensor,
    keys: torch.Tensor,
    unseen: torch.Tensor,
    scale: float,
    cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return weights of attention, mean over heads, (answers, rows, keys) float32.

    query: (answers, rows, heads, width). keys: (answers, blocks, key heads, block, width), each key head of which serves
    heads / key heads consecutive heads. unseen: (answers, rows, keys) bool, all keys of blocks. cap: of scores, 0 for none.
    sinks: (heads,), scores that take part in the softmax without being keys.
    """
    answers, rows, heads, width = query.shape
    shared = keys.shape[2]
    keys = keys.transpose(1, 2).flatten(2, 3).float()  # (answers, key heads, keys, width)
    grouped = (query.float() * scale).view(answers, rows, shared, heads // shared, width).permute(0, 2, 3, 1, 4)
    scores = grouped.flatten(2, 3) @ keys.transpose(-1, -2)
    scores = scores.view(answers, heads, rows, -1)
    if cap:
        scores.div_(cap).tanh_().mul_(cap)
    scores.masked_fill_(unseen[:, None], -torch.inf)
    found = scores.softmax(-1)
    if sinks is not None:
        own = (scores.logsumexp(-1) - sinks.float()[:, None]).sigmoid_()  # the keys' share beside the sink
        found *= own[..., None]
    return found.mean(1)


def hidden(positions: torch.Tensor, keys: int, window: int) -> torch.Tensor:
    """Return which keys rows at `positions` (answers, rows) do not see, (answers, rows, keys); `window`: 0 for none."""
    behind = positions[..., None] - torch.arange(keys, device=positions.device)
    return (behind < 0) | (behind >= window) if window else behind < 0


def pieces_of(looks: Sequence[Look], scores: int) -> Iterator[Piece]:
    """Yield the rows of looks in pieces that see at most so many keys together, or of one row."""
    result = 0
    for look in looks:
        start = look.start
        while start < look.stop:
            stop = min(look.stop, start + max(1, scores // look.stop))
            yield Piece(look, start, stop, result)
            result, start = result + stop - start, stop


def batches_of(pieces: Sequence[Piece], cost: Callable[[int, int], int]) -> Iterator[list[Piece]]:
    """Yield batches of pieces with nearly as many rows and keys, each within the budget unless one piece is not.

    Padding then at most doubles rows and quadruples keys. cost: elements of one answer of a batch, by its rows and span.
    """

    def size(piece: Piece) -> tuple[int, int]:
        return (piece.stop - piece.start).bit_length(), (piece.stop.bit_length() + 1) // 2

    group, rows, span = list[Piece](), 0, 0
    for piece in sorted(pieces, key=size):
        most, longest = max(rows, piece.stop - piece.start), max(span, piece.stop)
        if group and (size(piece) != size(group[0]) or (len(group) + 1) * cost(most, longest) > BUDGET):
            yield group
            group, most, longest = [], piece.stop - piece.start, piece.stop
        group.append(piece)
        rows, span = most, longest
    if group:
        yield group


def keep_blocks(builder: Any) -> None:
    """Let a builder's metadata keep the batch's block table, which FlashInfer's splits; harmless if repeated."""
    if getattr(builder.build, "helmsight", False):
        return
    build = builder.build

    def building(self: Any, common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        meta = build(self, common_prefix_len, common_attn_metadata, *args, **kwargs)
        meta.block_table = common_attn_metadata.block_table_tensor
        return meta

    building.helmsight = True  # type: ignore[attr-defined]
    builder.build = building


def _backend(impl: Any) -> str:
    """Return the name of a backend's class, which the reader's extension of it has too."""
    return type(impl).__name__


def _is_plain(layer: Any) -> bool:
    impl, cache = layer.impl, layer.kv_cache
    form = (impl.num_kv_heads, 2 * impl.head_size)
    shaped = isinstance(cache, torch.Tensor) and cache.dim() == 4 and (cache.shape[1], cache.shape[3]) == form
    return shaped and cache.dtype in FLOATS and getattr(layer, "isa", COLUMNS[0]) in COLUMNS


def _window(impl: Any) -> int:
    """Return how many tokens a row sees, itself among them; 0 for all."""
    window = impl.sliding_window
    if isinstance(window, tuple):  # tokens to the left, and to the right
        return int(window[0]) + 1
    return max(0, window or 0)


def _table(of: Pass, places: Any, span: int) -> torch.Tensor:
    """Return the blocks of answers' first `span` tokens, (answers, blocks); those behind a shorter one's end are any."""
    blocks = -(-span // of.cache.shape[2])
    return of.meta.block_table[places, :blocks].long().clamp(0, len(of.cache) - 1)


def _indices(group: Sequence[Piece]) -> list[Ints]:
    """Return a batch's rows, positions, places, results and taken; padding repeats a piece's first row."""
    counts = np.array([piece.stop - piece.start for piece in group])
    steps = np.arange(counts.max())
    steps = np.where(steps < counts[:, None], steps, 0)
    starts = np.array([piece.start for piece in group])[:, None]
    firsts = np.array([piece.look.first - piece.look.start for piece in group])[:, None] + starts
    taken = np.flatnonzero(np.arange(counts.max()) < counts[:, None])
    results = np.concatenate([np.arange(piece.stop - piece.start) + piece.result for piece in group])
    places = np.array([piece.look.place for piece in group])
    return [(firsts + steps).ravel(), (starts + steps).ravel(), places, results, taken]
