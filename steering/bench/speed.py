"""Decoding speed against the limit that bandwidth sets, and the time to the first token after a large picture.

Each decode step reads every weight of the decoder, and every row's keys and values.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import nn

from steering.accel.kernel import decode_kernel_of
from steering.bench.answering import answered
from steering.bench.device import bandwidth, graphed, products, seconds
from steering.bench.rows import Gauge, Unavailable
from steering.bench.trial import Trial
from steering.decoder.attention import Decode
from steering.decoder.kv import KVPool
from steering.decoder.packed import packed_bytes
from steering.front.engine import Engine
from steering.model.mllm import MLLM
from steering.protocol.request import Request

GIGA = 1e9
TEXT = 8
"""Words of a question after a picture."""


def limits(trial: Trial) -> Iterator[Gauge]:
    """Measure what the device can do at best."""
    speed = bandwidth(trial.place, trial.size.copied)
    yield Gauge("limits", f"copy of {trial.size.copied / 2**20:,.0f} MiB", speed / GIGA, "GB/s", "read and written")
    width = 8192 if trial.place.type == "cuda" else 256
    dtype = getattr(torch, trial.dtype)
    rate = products(trial.place, dtype, width)
    yield Gauge("limits", f"product of {width} x {width} in {trial.dtype}", rate / 1e12, "TFLOP/s")


def decode(trial: Trial) -> Iterator[Gauge]:
    """Measure steps of the engine as it is, of its model alone, and of the model as a CUDA graph."""
    speed = bandwidth(trial.place, trial.size.copied)
    begun = time.perf_counter()
    engine = trial.engine(max(trial.size.batches))
    yield Gauge("decode", "until the engine is ready, including building the model", time.perf_counter() - begun, "s")
    yield Gauge("decode", "weights read per step", weights_read(engine.mllm) / GIGA, "GB")
    for rows in trial.size.batches:
        yield from _steps("decode", "engine", trial, engine, rows, speed)
        yield from _measure_alone(trial, engine, rows, trial.size.prompt + trial.tokens, speed)
    yield from _measure_alone(trial, engine, 1, trial.size.long, speed)


@torch.inference_mode()
def _measure_alone(trial: Trial, engine: Engine, rows: int, columns: int, speed: float) -> Iterator[Gauge]:
    """Measure steps of the model alone."""
    label = f"the model alone, {columns:,} columns"
    step = model_alone(engine.mllm, rows, columns)
    least = bytes_read(engine, rows, columns) / speed
    yield from _rows_of_duration("decode", label, rows, seconds(trial.place, step, repeats=5, times=4), least)
    try:
        replay = graphed(trial.place, step)
        yield from _rows_of_duration(
            "decode", f"{label}, as a CUDA graph", rows, seconds(trial.place, replay, repeats=5, times=4), least
        )
    except Unavailable as reason:
        yield Gauge("decode", f"{label}, as a CUDA graph, {rows} at once", None, note=str(reason))


def eager(trial: Trial) -> Iterator[Gauge]:
    """Measure steps of the engine without graphs."""
    if trial.place.type != "cuda":
        raise Unavailable(f"{trial.place.type} has no CUDA graphs: its engine never uses any.")
    speed = bandwidth(trial.place, trial.size.copied)
    engine = trial.engine(max(trial.size.batches), compiled=False)
    for rows in trial.size.batches:
        yield from _steps("eager", "engine without graphs", trial, engine, rows, speed)


def first_token(trial: Trial) -> Iterator[Gauge]:
    """Measure a new picture, the same again, text of as many tokens, and a text in several chunks; medians."""
    engine = trial.engine(1, max_length=trial.size.length + trial.size.long)
    across, down = trial.size.image
    repeats = 3 if trial.quick else 6
    count = across * down

    def new() -> Request:
        return trial.ask(text=TEXT, picture=(across, down), tokens=4)

    answered(engine, [new()])
    runs = [answered(engine, [new()]) for _ in range(repeats)]
    prepared, first = (statistics.median(getattr(run, name) for run in runs) for name in ("prepared", "first"))
    label = f"{count:,} image tokens"
    yield Gauge("first token", f"{label}, new image", 1e3 * (prepared + first), "ms", "from a PIL image to the token")
    yield Gauge(
        "first token", f"{label}, of which in the processor", 1e3 * prepared, "ms", "on the CPU, in the caller's thread"
    )
    yield Gauge(
        "first token", f"{label}, of which in the engine", 1e3 * first, "ms", f"{count / first:,.0f} tokens a second"
    )
    request = new()
    answered(engine, [request])
    again = statistics.median(answered(engine, [request]).first for _ in range(repeats))
    yield Gauge(
        "first token", f"{label}, cached image, in the engine", 1e3 * again, "ms", "the image's features are cached"
    )
    for number in (count, trial.size.long):
        texts = statistics.median(answered(engine, [trial.ask(text=number, tokens=4)]).first for _ in range(repeats))
        note = f"{number / texts:,.0f} tokens a second"
        yield Gauge("first token", f"{number:,} words, in the engine", 1e3 * texts, "ms", note)


def weights_read(mllm: MLLM) -> int:
    """Return the bytes of the weights that a decode step reads: the decoder's and the output's, without tables of tokens."""
    tables = {id(module.weight) for module in mllm.decoder.modules() if isinstance(module, nn.Embedding)}
    read = {id(parameter): parameter for parameter in mllm.decoder.parameters() if id(parameter) not in tables}
    output = mllm.model.get_output_embeddings().weight
    read[id(output)] = output
    return sum(parameter.nbytes for parameter in read.values()) + packed_bytes(mllm.decoder)


def bytes_read(engine: Engine, rows: int, columns: int) -> float:
    """Return the bytes that a decode step of `rows` rows, each of `columns` columns, must read, and of states write."""
    stats = engine.stats()
    states = sum(engine.core.runner.pool.states.slot_bytes.values())  # one is read, the other written
    return weights_read(engine.mllm) + rows * (columns * stats["kv_bytes"] / stats["kv_max_tokens"] + states)


@torch.inference_mode()
def model_alone(mllm: MLLM, rows: int, columns: int) -> Callable[[], torch.Tensor]:
    """Return a decode step of the decoder and its output, (rows, vocabulary), with its own KV cache, without sampling."""
    pool = KVPool(rows, columns + 1)  # a row that writes to the last column pads a batch
    tokens = torch.zeros(rows, 1, dtype=torch.int64, device=mllm.device)
    positions = torch.full((rows,), columns - 1, device=mllm.device)
    mask = torch.ones(rows, 1, 1, 1, dtype=torch.bool, device=mllm.device)

    def run() -> torch.Tensor:
        out = mllm.decoder(
            **mllm.token_inputs(tokens),
            position_ids=positions[:, None],
            attention_mask=mask,
            use_cache=False,
            step=Decode(pool, positions, columns, kernel=decode_kernel_of(mllm)),
        )
        return mllm.head(out.last_hidden_state[:, -1])

    run()  # the pool is made at first use
    pool.states.lengths_on(mllm.device)[0] = columns - 1  # as if there were states behind the tokens before
    return run


def _steps(section: str, label: str, trial: Trial, engine: Engine, rows: int, speed: float) -> Iterator[Gauge]:
    requests = [trial.ask() for _ in range(rows)]
    answered(engine, requests[:1])  # makes everything made at first use
    times = answered(engine, requests)
    columns = trial.size.prompt + trial.tokens // 2
    yield from _rows_of_duration(section, label, rows, times.step, bytes_read(engine, rows, columns) / speed)


def _rows_of_duration(section: str, label: str, rows: int, duration: float, least: float) -> Iterator[Gauge]:
    name = f"{label}, {rows} at once"
    yield Gauge(section, name, 1e3 * duration, "ms a step", f"{rows / duration:,.0f} tokens a second")
    yield Gauge(
        section, name, 100 * least / duration, "% of the limit", f"memory bandwidth allows {1e3 * least:.3g} ms"
    )
