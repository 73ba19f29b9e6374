"""The beginnings of prompts that others had run: answers and readouts are those of prompts that run whole."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

import steering
from steering import Diagnose, Generate, Pai, Request, Sampling, See, Steer, Think, Vcd
from steering.decoder.kv import KVBlocks, KVPool
from steering.prompt.blocks import SIZE
from steering.prompt.spans import QUESTION
from steering.protocol.slots import Pool, PrefillChunk, Reuse, Slots
from steering.runner.prefix import WORTH
from tests.steering.conftest import MakeEngine, a_sequence
from tests.steering.parallel.asking import chat, differences, picture, requests, said

ROOM = 2**26
SYSTEM = {"role": "system", "content": "The star is red, the circle is green, the heart is blue. " * 3}
RED, BLUE = picture(200, 30, 40), picture(20, 60, 220)
Engines = tuple[steering.Engine, steering.Engine]


def engine_of(mllm: steering.MLLM, room: int = ROOM, **options: Any) -> steering.Engine:
    settings: dict[str, Any] = {"slots": 6, "max_length": 512, "self_check": False} | options
    return steering.Engine(mllm, prefix_cache_bytes=room, **settings)


@pytest.fixture(scope="module")
def engines() -> Engines:
    """Engines of the embedded model, one that keeps nothing and one that does."""
    mllm = steering.load(dtype="float32")
    return engine_of(mllm, 0), engine_of(mllm)


@pytest.fixture
def fresh(engines: Engines) -> steering.Engine:
    """Return an engine that has seen no prompt."""
    return engine_of(engines[0].mllm)


def asking(request: Request, question: str) -> Request:
    """Return the request behind a system prompt, with another question."""
    last = request.messages[-1]
    parts = [*last["content"][:-1], {"type": "text", "text": question}]
    return replace(request, messages=[SYSTEM, {**last, "content": parts}])


def a_request(question: str = "What colour is the star?", *asked: Any, of: Any = RED, **more: Any) -> Request:
    return asking(Request(chat(of), Sampling(max_tokens=3, logprobs=3, ignore_eos=True), asked, **more), question)


def reused(engine: steering.Engine, request: Request) -> int:
    """Return the number of prompt tokens that were cached; the answer is limited to one token."""
    short = replace(request, sampling=replace(request.sampling, max_tokens=1))
    return engine.generate([short])[0].cached_tokens


def a_vector(mllm: steering.MLLM, size: float = 0.05) -> steering.SteeringVector:
    ones = torch.ones(mllm.num_layers)
    direction = torch.full((mllm.num_layers, mllm.hidden_size), size)
    return steering.SteeringVector("v", direction, ones, ones, ones, (1, 2), mllm.fingerprint)


def test_every_request_is_answered_as_without(engines: Engines) -> None:
    cold, warm = engines
    for name, asked in requests(cold.mllm).items():
        one, another = (asking(asked, question) for question in ("What colour is the star?", "Which picture is red?"))
        reused(warm, one if one.forced is None else replace(one, forced=()))
        expected, got = (engine.generate([another])[0] for engine in (cold, warm))
        assert differences(said(got), said(expected), tolerance=2e-4) == [], name
        whole = asked.readouts is not None and asked.readouts.residual_rows == "prompt"  # which reads every row
        assert got.cached_tokens == 0 if whole else got.cached_tokens >= 3 * SIZE, name


@pytest.mark.parametrize("family", ["llava", "qwen3_vl", "gemma3", "idefics3", "mistral3", "gemma4", "gpt_oss"])
def test_families(make_engine: MakeEngine, family: str) -> None:
    cold, warm = make_engine(family), make_engine(family, prefix_cache_bytes=ROOM)
    asked: list[Any] = [See(alpha=0.5)] if family == "gemma4" else [See(alpha=0.5), Think(threshold=0.1)]
    for question in ("What colour is the star?", "Is it red?"):
        request = a_request(question, *asked, diagnose=Diagnose({"focus", "modality", "decay"}))
        expected, got = (said(engine.generate([request])[0]) for engine in (cold, warm))
        assert differences(got, expected, tolerance=1e-3) == []
    assert warm.stats()["prefix_cache_hits"] == (family != "gemma3")  # whose image tokens see those behind them


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.3), ("float16", 0.03)])
def test_half_precision(dtype: str, tolerance: float) -> None:
    mllm = steering.load(dtype=dtype)
    cold, warm = engine_of(mllm, 0), engine_of(mllm)
    assert reused(warm, a_request("Is it red?")) == 0
    expected, got = (engine.generate([a_request()])[0].choices[0] for engine in (cold, warm))
    assert warm.stats()["prefix_cache_hits"] == 1
    assert got.token_ids == expected.token_ids
    for one, other in zip(got.logprobs or (), expected.logprobs or (), strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=tolerance)


def test_prompts_of_one_batch_begin_where_each_is_known_to(engines: Engines) -> None:
    """A prompt is unknown, one known by its system prompt, one by all but its end; they are padded together."""
    cold, _ = engines
    warm = engine_of(cold.mllm)
    assert reused(warm, a_request("Is it red?", of=BLUE)) == 0
    focus = Diagnose({"focus", "modality"})
    batch = [
        Request(chat(RED), Sampling(max_tokens=3, logprobs=3, ignore_eos=True), See(alpha=0.4)),
        a_request(of=RED, diagnose=focus),
        a_request(of=BLUE, diagnose=focus),
    ]
    steps = warm.stats()["steps"]
    got, expected = ([said(result) for result in engine.generate(batch)] for engine in (warm, cold))
    assert differences(got, expected, tolerance=2e-4) == []
    assert warm.stats()["steps"] - steps == 2  # in the first, all prompts and two tokens each
    assert warm.stats()["prefix_cache_hits"] == 2


def test_prompts_that_begin_alike_wait_for_the_first(engines: Engines, fresh: steering.Engine) -> None:
    questions = ("What colour is the star?", "Is it red?", "Which picture is red?")
    batch = [a_request(question) for question in questions]
    found = fresh.generate(batch)
    assert [one.cached_tokens >= 4 * SIZE for one in found] == [False, True, True]
    assert fresh.stats()["steps"] == 3  # the first prompt and two of its tokens; then both others
    expected = [said(result) for result in engines[0].generate(batch)]
    assert differences([said(result) for result in found], expected, tolerance=2e-4) == []
    other = engine_of(engines[0].mllm)
    apart = [a_request("Is it red?", See(alpha=alpha)) for alpha in (0.1, 0.2)]
    other.generate(apart)
    assert other.stats()["steps"] == 2  # both at once: nothing is shared


@pytest.mark.parametrize(("family", "tiles"), [("qwen2_vl", 1), ("qwen3_vl", 1), ("internvl", 3)])
def test_known_pictures_are_not_encoded(
    make_engine: MakeEngine, family: str, tiles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cold, warm = make_engine(family), make_engine(family, prefix_cache_bytes=ROOM, image_cache_bytes=0)

    def encoded(question: str, *more: Any) -> float:
        """Return the number of pictures encoded for a prompt of a red one, a text, and more."""
        behind = [{"type": "text", "text": "A picture of a star. " * 9}, *more, {"type": "text", "text": question}]
        content = [{"type": "image", "image": RED}, *behind]
        request = Request([SYSTEM, {"role": "user", "content": content}], Sampling(max_tokens=3, logprobs=3))
        before = warm.stats()["image_cache_misses"]
        got, expected = (said(engine.generate([request])[0]) for engine in (warm, cold))
        assert differences(got, expected, tolerance=1e-3) == []
        return warm.stats()["image_cache_misses"] - before

    assert [encoded("Is it red?"), encoded("What is it?")] == [tiles, 0]
    both = encoded("Which is red?", {"type": "image", "image": BLUE})
    assert both == (1 if tiles == 1 else 2 * tiles)  # tiles of several pictures are not told apart
    # What was known when it was embedded, and no longer when it runs, is embedded anew.
    monkeypatch.setattr("steering.runner.prefix.PrefixCache.begin", lambda *_: None)
    assert encoded("Is it blue?") == tiles


def test_nothing_is_shared_between_settings(fresh: steering.Engine) -> None:
    vector, other = a_vector(fresh.mllm), a_vector(fresh.mllm, 0.06)
    kinds: list[tuple[Any, ...]] = [
        (),
        (See(alpha=0.2),),
        (See(alpha=0.3),),
        (See(alpha=0.2, reading="scale"),),
        (Think(threshold=0.1),),
        (Think(threshold=0.2),),
        (Steer(vector, 1.0),),
        (Steer(vector, 1.1),),
        (Steer(vector, 1.0, layers=(1,)),),
        (Steer(vector, 1.0, tokens="text"),),
        (Steer(other, 1.0),),  # of the same name: it was replaced
        (See(alpha=0.2), Steer(vector, 1.0)),
    ]
    for kind in kinds:
        assert reused(fresh, a_request("What colour is the star?", *kind)) == 0, kind
    for kind in kinds:
        assert reused(fresh, a_request("Which picture is red?", *kind)) >= 4 * SIZE, kind


def test_a_picture_is_known_by_its_content(fresh: steering.Engine) -> None:
    alone = reused(fresh, a_request(of=RED))
    system = reused(fresh, a_request(of=BLUE))
    assert (alone, system) == (0, 3 * SIZE)
    assert reused(fresh, a_request("Is it red?", of=BLUE)) > system


def test_what_a_readout_needs_runs_again(fresh: steering.Engine) -> None:
    """Focus and modality read the question's rows, drift the last one, and what reads every row has them run."""
    reused(fresh, a_request())
    again = {
        name: reused(fresh, a_request(diagnose=Diagnose({name}, residual_rows="prompt")))
        for name in ("decay", "focus", "modality", "residual")
    }
    assert again["decay"] > again["focus"] == again["modality"] >= 4 * SIZE > again["residual"] == 0


def test_little_of_a_long_prompt_spares_nothing(fresh: steering.Engine) -> None:
    """The passes behind it would have a mask, which takes longer."""
    long = "the star is red " * 100
    assert [reused(fresh, a_request(f"{long}{end}", of=colour)) for end, colour in (("?", RED), ("!", BLUE))] == [0, 0]
    assert reused(fresh, a_request(f"{long}?", of=BLUE)) > 9 * SIZE


def test_what_only_later_requests_measure_is_measured_then(engines: Engines, fresh: steering.Engine) -> None:
    """The states of images are kept with what asks for them, and not known of what did not."""
    maps = a_request(diagnose=Diagnose({"tam"}, causal=True))
    expected = said(engines[0].generate([maps])[0])
    assert [reused(fresh, one) for one in (a_request(), maps)] == [0, 0]
    assert reused(fresh, maps) >= 4 * SIZE
    assert differences(said(fresh.generate([maps])[0]), expected, tolerance=2e-4) == []
    assert reused(fresh, a_request()) >= 4 * SIZE


def test_room_is_bounded_and_the_oldest_goes_first(engines: Engines) -> None:
    probe = engine_of(engines[0].mllm)
    probe.generate([a_request()])
    room = int(probe.stats()["prefix_cache_bytes"])
    engine = engine_of(engines[0].mllm, room)
    blue, red = a_request(of=BLUE), a_request(of=RED)
    whole = [reused(engine, one) for one in (red, red)][1]
    assert engine.stats()["prefix_cache_bytes"] == room
    assert reused(engine, blue) == 3 * SIZE  # the system prompt stays, because it is in use
    assert engine.stats()["prefix_cache_bytes"] <= room
    assert reused(engine, blue) == whole
    assert reused(engine, red) == 3 * SIZE
    small = engine_of(engines[0].mllm, room // 3)
    assert [reused(small, red) for _ in range(2)] == [0, whole // SIZE // 3 * SIZE]
    assert small.stats()["prefix_cache_bytes"] <= room // 3


def test_whatever_comes_together_and_is_let_go_of_meanwhile(engines: Engines) -> None:
    """Drawn at random, in chunks, with room for the least part, several times."""
    cold, rng = engines[0], random.Random(3)
    kinds: list[tuple[Any, ...]] = [(), (See(alpha=0.4),), (Think(threshold=0.1),), (Vcd(),), (Generate(refresh=2),)]
    reads = [None, Diagnose({"focus", "modality"}), Diagnose({"tam"}, causal=True)]
    asked = [
        a_request(question, *kind, of=rng.choice([RED, BLUE]), diagnose=rng.choice(reads), n=rng.randint(1, 2))
        for kind in kinds
        for question in ("What colour is the star?", "Is it red?")
    ]
    drawn = [replace(one, sampling=replace(one.sampling, temperature=1.3, seed=7)) for one in asked]
    expected = [said(result) for result in cold.generate(drawn)]
    warm = engine_of(cold.mllm, 2**19, prefill_budget=64)
    for _ in range(3):
        some = rng.choices(range(len(drawn)), k=6)
        found = warm.generate([drawn[number] for number in some])
        for number, result in zip(some, found, strict=True):
            assert differences(said(result), expected[number], tolerance=5e-4) == [], drawn[number].asked
        assert_slots_hold_what_is_noted(warm)
    stats = warm.stats()
    assert stats["prefix_cache_hits"] > 8
    assert stats["prefix_cache_bytes"] <= 2**19


def assert_slots_hold_what_is_noted(engine: steering.Engine) -> None:
    prefixes, pool = engine.core.runner.prefixes, engine.core.runner.pool
    blocks = {block.mark: block.number for block in prefixes._blocks.values()}
    assert prefixes._store is not None
    for slot, marks in prefixes._lying.items():
        for at, mark in enumerate(marks):
            for pooled, (_, kept) in zip(pool.tensors, prefixes._store._pairs, strict=True):
                lies = pooled[slot, :, at * SIZE : (at + 1) * SIZE]
                assert mark not in blocks or torch.equal(lies, kept[blocks[mark]])


def test_what_lies_in_a_slot_is_not_copied_there(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of a prompt that begins as the one before it did, nor of an answer that takes the place of one that did."""
    loaded, moved = [], []
    load, copy = KVBlocks.load, KVPool.copy

    def noted_load(self: KVBlocks, slot: int, first: int, blocks: list[int]) -> None:
        loaded.append((first, len(blocks)))
        load(self, slot, first, blocks)

    def noted_copy(self: KVPool, source: int, target: int, length: int, there: int = 0) -> None:
        moved.append((there, length))
        copy(self, source, target, length, there)

    cold, warm = engines[0], engine_of(engines[0].mllm)
    questions = ("What colour is the star?", "Is it red?", "Which picture is red?")
    short = [a_request(question) for question in questions]
    long = [replace(one, sampling=replace(one.sampling, max_tokens=9)) for one in short]
    batch = [short[2], long[1], long[0]]  # the first leaves, and the last takes its slot
    expected = [said(result) for result in cold.generate(batch)]
    monkeypatch.setattr(KVBlocks, "load", noted_load)
    monkeypatch.setattr(KVPool, "copy", noted_copy)
    known = reused(warm, short[0]) + reused(warm, short[1]) // SIZE
    assert loaded == [(known, 0)]
    assert differences([said(result) for result in warm.generate(batch)], expected, tolerance=2e-4) == []
    assert [first for first, _ in loaded[1:]] == [known, 0, 0]
    assert {there for there, _ in moved} == {known * SIZE}
    assert_slots_hold_what_is_noted(warm)
    other = a_request(questions[0], See(alpha=0.5))
    assert reused(warm, other) == 0  # what it leaves in the first slot is another one's
    assert_slots_hold_what_is_noted(warm)
    assert reused(warm, short[1]) > 0
    assert loaded[-1][0] == 0


def test_a_copy_that_fails_is_made_anew(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt has several answers, which are then run one by one."""
    warm, copy, failures = engine_of(engines[0].mllm), KVPool.copy, [RuntimeError("once")]

    def once(self: KVPool, *places: int) -> None:
        if failures:
            raise failures.pop()
        copy(self, *places)

    three = a_request(n=3)
    expected = said(engines[0].generate([three])[0])
    monkeypatch.setattr(KVPool, "copy", once)
    assert differences(said(warm.generate([three])[0]), expected, tolerance=2e-4) == []
    assert not failures
    assert_slots_hold_what_is_noted(warm)


def test_what_a_fault_spoilt_is_copied_anew(engines: Engines) -> None:
    warm = engine_of(engines[0].mllm)
    warm.generate([a_request()])
    warm.core.runner.clear(0)
    expected = said(engines[0].generate([a_request("Is it red?")])[0])
    assert differences(said(warm.generate([a_request("Is it red?")])[0]), expected, tolerance=2e-4) == []
    assert_slots_hold_what_is_noted(warm)


def test_slots_that_touch_prompts_and_say_nothing_of_it_share_none(engines: Engines) -> None:
    pool = Pool(engines[0].mllm, 1, 64, 1)

    class Touching(Slots):
        def prefill(self, chunk: PrefillChunk) -> None:
            return None

    class Keeping(Slots):
        def keep(self, *_: Any) -> None:
            return None

    sequence = a_sequence([QUESTION] * 5)
    assert [one("one", pool).reuse(sequence) for one in (Touching, Keeping, Slots)] == [None, None, Reuse(5)]


def test_the_turns_of_a_chat(engines: Engines, fresh: steering.Engine) -> None:
    """The second prompt is the first, its answer and a question; what PAI generates is not what a prompt leaves."""
    cold, words = engines[0], " ".join(["the star is red and the circle is blue"] * 9)

    def turns(of: Any, *asked: Any) -> list[Request]:
        first = a_request("What is there?", *asked, of=of)
        more = [{"role": "assistant", "content": words}, {"role": "user", "content": "Is it so?"}]
        said = replace(first, forced=words, sampling=replace(first.sampling, max_tokens=None, ignore_eos=False))
        return [said, replace(first, messages=[*first.messages, *more])]

    kinds: list[tuple[Any, ...]] = [(RED,), (RED, See(alpha=0.3)), (BLUE, Pai())]  # no two know each other's turns
    ones, twos = zip(*(turns(*kind) for kind in kinds), strict=True)
    prompts = [result.prompt_tokens for result in fresh.generate(ones)]
    for kind, prompt, *both in zip(kinds, prompts, fresh.generate(twos), cold.generate(twos), strict=True):
        got, expected = both
        assert differences(said(got), said(expected), tolerance=2e-4) == []
        assert (got.cached_tokens > prompt + WORTH * SIZE) == (len(kind) == 1), kind
        assert got.cached_tokens >= prompt - SIZE - 1


def full(*_: Any) -> None:
    raise torch.OutOfMemoryError("no room")


def test_what_cannot_be_kept_is_answered(fresh: steering.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steering.runner.prefix.RESTS", (1, 1))
    fresh = engine_of(fresh.mllm)
    fresh.core.runner.prefixes.rest()  # as after a failure, which frees its memory
    with monkeypatch.context() as patched:
        patched.setattr("steering.runner.prefix.KVBlocks", full)
        assert [reused(fresh, a_request()) for _ in range(4)] == [0] * 4
    assert (fresh.stats()["finished"], fresh.stats()["faults"]) == (4, 0)
    assert [reused(fresh, a_request()) > 0 for _ in range(3)][-1]


def test_what_cannot_be_kept_once_is_later(fresh: steering.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failure caching pauses for `RESTS[0]` prompts, and for twice as many after the next one."""
    monkeypatch.setattr("steering.runner.prefix.RESTS", (2, 4))
    fresh = engine_of(fresh.mllm)
    with monkeypatch.context() as patched:
        patched.setattr(KVBlocks, "save", full)
        assert [reused(fresh, a_request()) for _ in range(4)] == [0] * 4
    assert [reused(fresh, a_request()) > 0 for _ in range(6)] == [False] * 5 + [True]
    assert fresh.stats()["faults"] == 0


def test_a_short_prompt_is_not_kept(fresh: steering.Engine) -> None:
    short = Request([{"role": "user", "content": "What is this? " * 9}], Sampling(max_tokens=2))
    (answer,) = fresh.generate([short])
    assert SIZE < answer.prompt_tokens <= WORTH * SIZE
    assert reused(fresh, short) == fresh.stats()["prefix_cache_bytes"] == 0
    longer = replace(short, messages=[{"role": "user", "content": "What is this? " * 20}])
    assert reused(fresh, longer) == 0
    assert reused(fresh, longer) >= WORTH * SIZE
