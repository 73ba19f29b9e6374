"""The prefix cache: keys, values and measurements of earlier prompts' beginnings, in blocks of tokens.

A block is identified by the hash of everything before its end (`prompt.blocks`) and by what was done to it, so that nothing
is shared between different settings. Slots share no memory: blocks are copied in and out, except into a slot where the
previous sequence left the same ones. The least recently used blocks go first; of one prompt, the last.

A model with recurrent states can go on only behind a block whose states were kept. A snapshot is large, so there are four of
a prompt at most: behind its last whole block, behind all that it may leave out itself, where it departs from what was
cached, and where others that wait depart from it.
"""

from __future__ import annotations

import itertools
import logging
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from steering.decoder.hooks import Hook
from steering.decoder.kv import KVBlocks, KVPool
from steering.form import OneForm
from steering.lru import ByteBoundedLRU
from steering.model.embedded import Embedded
from steering.prompt.blocks import SIZE
from steering.protocol.sequence import Sequence
from steering.protocol.slots import Computed, HookPlans, PrefillChunk
from steering.recurrent.states import GRAIN, Snapshot, snapshot_bytes

log = logging.getLogger(__name__)

WORTH = 4
"""Least number of blocks that a prompt waits a step for, or is kept for: fewer take no longer than the step."""
SHARE = 9
"""Least cached part of a prompt, as its divisor: what runs after a cached prefix needs a mask, which is slower."""
RESTS = 64, 4096
"""Number of prompts that are not cached after a failure, as from lack of memory: at first, and at most; it doubles."""
POSITIONS = "positions"
"""The name under which rotary positions (tokens, axes) are kept beside measurements."""
_Key = tuple[Hashable, bytes]


class _Plan(NamedTuple):
    """The sharing of a prompt.

    settings: what is done to it. keys: of its whole blocks, except the one with the last token. least, most: the number of
    them that must be cached, and that may be left out. needed: the parts whose measurements are needed then. generated: an
    answer's tokens may be shared, too, as part of a chat.
    """

    settings: tuple[Hashable, ...]
    keys: tuple[_Key, ...]
    least: int
    most: int
    needed: frozenset[str]
    generated: bool


class _Run(NamedTuple):
    """A running prompt: the measurements of its tokens so far (tokens, ...), in pieces, by part."""

    plan: _Plan
    measured: dict[str, list[torch.Tensor]]


@dataclass
class _Block:
    """A cached block.

    number: in `KVBlocks`. measured: (tokens, ...) by part. mark: unique to this block, even after it is dropped.
    """

    number: int
    measured: dict[str, torch.Tensor]
    mark: int

    @property
    def bytes(self) -> int:
        """Bytes of what was measured."""
        return sum(values.nbytes for values in self.measured.values())


class PrefixCache:
    """Keeps at most `capacity` bytes, 0 for none.

    `queries` counts prompts that were looked up, `hits` those with a cached prefix, `tokens` their cached tokens.
    """

    def __init__(self, pool: KVPool, hook_plans: HookPlans, capacity: int):
        self.queries = self.hits = self.tokens = 0
        self.capacity = capacity
        self._pool = pool
        self._hook_plans = hook_plans
        self._store: KVBlocks | None = None
        self._free: list[int] = []
        self._blocks: OrderedDict[_Key, _Block] = OrderedDict()
        self._beside = 0
        # Half is for recurrent states, where the model has any; a snapshot's key is that of the block before it.
        self._snapshots = ByteBoundedLRU[Snapshot](capacity // 2 if pool.states else 0, snapshot_bytes)
        if capacity and (least := sum(pool.states.slot_bytes.values()) // 2) > self._snapshots.capacity:
            log.warning(
                "no prompts are cached: the states behind one token take %d bytes, half the cache is less", least
            )
            self.capacity = self._snapshots.capacity = 0
        self._marks = itertools.count()
        self._lying: dict[int, tuple[int, ...]] = {}  # by slot, the marks of the blocks in its first columns
        self._rest_length, self._resting = RESTS[0], 0
        self._form = OneForm()
        self._plans: WeakKeyDictionary[Sequence, _Plan | None] = WeakKeyDictionary()
        self._runs: WeakKeyDictionary[Sequence, _Run] = WeakKeyDictionary()
        self._tails: WeakKeyDictionary[Sequence, torch.Tensor] = WeakKeyDictionary()
        self._awaited: WeakKeyDictionary[Sequence, int] = WeakKeyDictionary()  # how many first tokens others share
        if self.capacity and pool.bytes:  # allocated at once, as the pool was; otherwise at the first prompt
            self._make()

    @property
    def bytes(self) -> int:
        """Bytes of the blocks that are kept now."""
        return self._bytes_of_blocks + self._snapshots.bytes

    @property
    def _bytes_of_blocks(self) -> int:
        return self._beside + len(self._blocks) * (0 if self._store is None else self._store.bytes_each)

    def stats(self) -> dict[str, int]:
        """Return the counters, and the bytes kept now."""
        counts = {"queries": self.queries, "hits": self.hits, "tokens": self.tokens, "bytes": self.bytes}
        return {f"prefix_cache_{name}": count for name, count in counts.items()}

    def rest(self) -> int:
        """Drop everything, and cache nothing of the next prompts, whose number is returned: a failure may pass."""
        self._store, self._beside = None, 0
        self._resting, self._rest_length = self._rest_length, min(2 * self._rest_length, RESTS[1])
        for entries in (
            self._blocks,
            self._snapshots,
            self._plans,
            self._runs,
            self._tails,
            self._awaited,
            self._lying,
        ):
            entries.clear()
        return self._resting

    def known(self, sequence: Sequence) -> int:
        """Return how many of a waiting prompt's first tokens are cached and need not run."""
        plan = self._plan(sequence)
        return 0 if plan is None else len(self._find_blocks(plan)) * SIZE

    def awaits(self, sequence: Sequence, others: Iterable[Sequence]) -> bool:
        """Return True where a waiting prompt should run after one of these, whose beginning it shares."""
        plan = self._plan(sequence)
        if plan is None:
            return False
        at = max(len(self._find_blocks(plan)) + WORTH, plan.least) - 1
        fits = at < (plan.most if self._store is None else min(plan.most, self._store.count))
        for other in others if fits else ():
            planned = self._plan(other)
            if planned is None or planned.keys[at : at + 1] != plan.keys[at : at + 1]:
                continue
            if not plan.needed <= planned.needed:
                continue
            if not self._pool.states:
                return True
            shared = _shared_length(plan.keys[: plan.most], planned.keys) * SIZE // GRAIN * GRAIN
            if shared > at * SIZE:
                self._awaited[other] = shared  # so that it keeps its states there
                return True
        return False

    def begin(self, sequence: Sequence, prompt: Embedded) -> None:
        """Copy the cached prefix of a prompt into its slot, where its settings have been written."""
        lying = self._lying.pop(sequence.slot, ())
        plan = self._plan(sequence)
        if plan is None or not prompt.divisible:
            return
        positions = prompt.positions.reshape(-1, prompt.length).T  # (tokens, axes)
        self.queries += 1
        blocks = self._find_blocks(plan)
        known_length = len(blocks) * SIZE
        if blocks and not bool((_positions(blocks) == positions[:known_length]).all()):
            return
        self._runs[sequence] = run = _Run(plan, {POSITIONS: [positions]})
        sequence.prefill.wanted = self._wanted(plan, len(blocks), self._awaited.get(sequence, 0))
        if not blocks or self._store is None:
            return
        self._touch(plan.keys[: len(blocks)])
        marks = tuple(block.mark for block in blocks)
        shared = _shared_length(lying, marks)
        self._store.load(sequence.slot, shared, [block.number for block in blocks[shared:]])
        self._lying[sequence.slot] = marks
        if (snapshot := self._snapshots.get(plan.keys[len(blocks) - 1])) is not None:
            self._pool.states.put(sequence.slot, known_length, snapshot)
        for part in self._hook_plans.of([sequence]).keeping:
            if part.name in plan.needed:
                run.measured[part.name] = [_join(blocks, part.name)]
                part.regain(sequence, run.measured[part.name][0])
        sequence.computed = sequence.prefill.reused = known_length
        self.hits += 1
        self.tokens += known_length

    def measured(self, chunk: PrefillChunk, hooks: Mapping[str, Hook | None], computed: Computed) -> None:
        """Record the measurements of a chunk's tokens."""
        runs = [
            (row, run) for row, sequence in enumerate(chunk.sequences) if (run := self._runs.get(sequence)) is not None
        ]
        needed = frozenset[str]().union(*[run.plan.needed for _, run in runs])
        for part in self._hook_plans.of(chunk.sequences).keeping if needed else ():
            if part.name in needed and (values := part.by_row(chunk, hooks.get(part.name), computed)) is not None:
                for row, run in runs:
                    if part.name in run.plan.needed:
                        run.measured.setdefault(part.name, []).append(values[row, : chunk.lengths[row]])

    def keep(self, sequence: Sequence) -> None:
        """Keep the whole blocks of a prompt that has run and is still in its slot."""
        run = self._runs.pop(sequence, None)
        states, sequence.prefill.states = sequence.prefill.states, {}  # only the cache holds them while the answer runs
        if run is None or sequence.prefill.replay:  # masked pictures do not recur
            return
        keys = run.plan.keys
        first = next((at for at, key in enumerate(keys) if not self._has(key, run.plan.needed)), len(keys))
        if first < len(keys):
            measured = {name: torch.cat(parts)[first * SIZE :] for name, parts in run.measured.items()}
            self._add(sequence.slot, keys, first, measured)
        for tokens, snapshot in states.items():
            if (last := keys[tokens // SIZE - 1]) in self._blocks:
                self._snapshots.keep(last, snapshot)
        self._touch(keys)
        if run.plan.generated:
            self._tails[sequence] = run.measured[POSITIONS][0][len(keys) * SIZE :].clone()

    def keep_answer(self, sequence: Sequence) -> None:
        """Keep the whole blocks of an ended answer that is still in its slot, for the chat's next turn."""
        tail, plan = self._tails.pop(sequence, None), self._plans.get(sequence)
        if tail is None or plan is None or sequence.fed < WORTH * SIZE:
            return
        names = sequence.prompt.blocks_with(sequence.tokens[: sequence.fed])
        keys, known_blocks = tuple((plan.settings, name) for name in names), len(plan.keys)
        first = next((at for at, key in enumerate(keys) if key not in self._blocks), len(keys))
        if known_blocks <= first < len(keys):
            places = torch.arange(sequence.prompt.length, sequence.length, device=tail.device)
            rotary = places + int(sequence.prefill.rope_delta)
            positions = torch.cat([tail, rotary[:, None].expand(-1, tail.shape[1])])
            self._add(sequence.slot, keys, first, {POSITIONS: positions[(first - known_blocks) * SIZE :]})
        self._touch(keys)

    @contextmanager
    def copying(self, source: int, target: int, length: int) -> Iterator[int]:
        """Yield how many first columns the target already has, while `length` columns of a slot are copied to it."""
        copied, lying = self._lying.get(source, ())[: length // SIZE], self._lying.pop(target, ())
        yield _shared_length(copied, lying) * SIZE
        self._lying[target] = copied

    def spoilt(self, slot: int) -> None:
        """Record that a slot's columns have been overwritten."""
        self._lying.pop(slot, None)

    def _plan(self, sequence: Sequence) -> _Plan | None:
        """Return how a prompt may be shared; None where it may not."""
        if sequence not in self._plans:
            self._plans[sequence] = self._new_plan(sequence) if self.capacity and not self._resting else None
            self._resting = max(self._resting - 1, 0)
        return self._plans[sequence]

    def _new_plan(self, sequence: Sequence) -> _Plan | None:
        spec, prompt = sequence.spec, sequence.prompt
        if spec.edit is not None or prompt.length <= WORTH * SIZE:
            return None
        settings: list[Hashable] = [spec.salt]
        rows, needed, generated = prompt.length - 1, set(), True  # the last row gives the next token's logits
        for part in self._hook_plans.of([sequence]).keeping:
            reuse = part.reuse(sequence)
            if reuse is None:
                return None
            rows = min(rows, reuse.rows)
            if reuse.key != ():
                settings.append((part.name, reuse.key))
            if reuse.measured:
                needed.add(part.name)
            generated = generated and reuse.generated and reuse.key == () and not self._pool.states
        settings_key = tuple(settings)
        keys = tuple((settings_key, name) for name in prompt.blocks[: (prompt.length - 1) // SIZE])
        least = -(-prompt.length // (SHARE * SIZE))
        return _Plan(settings_key, keys, least, rows // SIZE, frozenset(needed), generated)

    def _find_blocks(self, plan: _Plan) -> list[_Block]:
        """Return the cached blocks of a prompt's beginning; none where they are too few to be useful."""
        blocks = self._cached(plan)
        if self._pool.states:
            while blocks and plan.keys[len(blocks) - 1] not in self._snapshots:
                blocks.pop()
        return blocks if len(blocks) >= plan.least else []

    def _cached(self, plan: _Plan) -> list[_Block]:
        """Return the cached blocks of a prompt's beginning, as far as they may be left out."""
        keys = itertools.takewhile(lambda key: self._has(key, plan.needed), plan.keys[: plan.most])
        return [self._blocks[key] for key in keys]

    def _wanted(self, plan: _Plan, found: int, awaited: int) -> tuple[int, ...]:
        """Return the numbers of a prompt's tokens behind which its recurrent states should be kept.

        found: how many blocks come from the cache. awaited: how many first tokens others that wait share.
        """
        if not self._pool.states:
            return ()
        behind = len(self._cached(plan)), min(plan.most, len(plan.keys)), len(plan.keys)
        ends = {blocks * SIZE // GRAIN * GRAIN for blocks in behind}
        return tuple(sorted(end for end in {*ends, awaited} if end > found * SIZE))

    def _has(self, key: _Key, needed: frozenset[str]) -> bool:
        block = self._blocks.get(key)
        return block is not None and needed <= block.measured.keys()

    def _touch(self, keys: Iterable[_Key]) -> None:
        """Mark blocks as used, so that a prompt's first ones are dropped last."""
        for key in reversed(list(keys)):
            if key in self._blocks:
                self._blocks.move_to_end(key)
            self._snapshots.get(key)

    def _add(self, slot: int, keys: tuple[_Key, ...], first: int, measured: Mapping[str, torch.Tensor]) -> None:
        """Keep a prompt's blocks with their measurements, from `first` on, as far as there is room beside earlier ones."""
        self._touch(keys[:first])
        store = self._store or self._make()
        earlier = {key: self._drop(key).measured for key in keys[first:] if key in self._blocks}
        key_set, new = set(keys), []
        for at, key in enumerate(keys[first:], first):
            rows = slice((at - first) * SIZE, (at + 1 - first) * SIZE)
            own_measured = {name: values[rows].clone() for name, values in measured.items()}
            for name, values in own_measured.items():
                self._form.check(name, [values], varies=name == POSITIONS)  # a text has one axis, pictures have several
            block = _Block(-1, earlier.get(key, {}) | own_measured, next(self._marks))
            if not self._make_room(block.bytes, key_set):
                break
            block.number = self._free.pop()
            self._blocks[key] = block
            self._beside += block.bytes
            new.append(block)
        if new:
            store.save(slot, first, [block.number for block in new])
            lying = self._lying.get(slot, ())
            if len(lying) == first:
                self._lying[slot] = (*lying, *[block.mark for block in new])

    def _make(self) -> KVBlocks:
        self._store = KVBlocks(self._pool, SIZE, self.capacity - self._snapshots.capacity)
        self._free = list(range(self._store.count))[::-1]
        return self._store

    def _make_room(self, beside: int, keys: set[_Key]) -> bool:
        """Drop the oldest until a block and `beside` bytes more fit; return False where only a prompt's `keys` are left."""
        assert self._store is not None
        while (
            not self._free
            or self._bytes_of_blocks + self._store.bytes_each + beside > self.capacity - self._snapshots.capacity
        ):
            oldest = next(iter(self._blocks), None)
            if oldest is None or oldest in keys:
                return False
            self._drop(oldest)
            self._snapshots.drop(oldest)
        return True

    def _drop(self, key: _Key) -> _Block:
        block = self._blocks.pop(key)
        self._free.append(block.number)
        self._beside -= block.bytes
        return block


def _positions(blocks: list[_Block]) -> torch.Tensor:
    """Return the positions (tokens, axes) of blocks.

    Where only prompts with images have several axes, the positions of a text are equal on each.
    """
    parts = [block.measured[POSITIONS] for block in blocks]
    axes = max(positions.shape[1] for positions in parts)
    return torch.cat([positions.expand(-1, axes) for positions in parts])


def _shared_length(first: tuple[Hashable, ...], second: tuple[Hashable, ...]) -> int:
    """Return the length of the common beginning."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def _join(blocks: list[_Block], name: str) -> torch.Tensor:
    """Return a part's measurements of consecutive blocks, (tokens, ...)."""
    return torch.cat([block.measured[name] for block in blocks])
