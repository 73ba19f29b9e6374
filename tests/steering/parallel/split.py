"""Two processes that run one model together: the first is asked, the second follows.

Each is forked with the environment that torchrun gives it.
"""

from __future__ import annotations

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

import steering
from steering import Engine, Fault, Options, Request, Sampling
from steering.core import tensor_parallel
from steering.protocol.intervention import register
from steering.protocol.slots import DecodeBatch, Slots
from tests.steering.parallel.asking import chat, picture, requests, said, told

ROOM = 2**20
"""Bytes for the beginnings of prompts: not all of them fit, so that each rank lets go of the same."""


class Trip(Options):
    """Every decode fails, on all ranks or on the second alone."""

    path = ("trip",)

    everywhere: bool = True


class TripSlots(Slots):
    def decode(self, batch: DecodeBatch) -> None:
        for sequence in batch.sequences:
            trip = sequence.spec.asked.get(self.name)
            if isinstance(trip, Trip) and (trip.everywhere or self.pool.mllm.ranks.rank):
                raise RuntimeError("tripped")


def together(engine: Engine, requests: dict[str, Request]) -> dict[str, Any]:
    """Run the same requests from several threads, while others arrive, fail and are cancelled."""
    chat_with_picture = chat(picture(9, 200, 90))
    long = Request(chat_with_picture, Sampling(max_tokens=100, ignore_eos=True, temperature=1.0))

    def leave(number: int) -> None:
        completion = engine.submit(long)
        for count, _ in enumerate(completion):
            if count == number:
                completion.cancel()

    def trip() -> str:
        try:
            return (
                engine.submit(Request(chat_with_picture, Sampling(max_tokens=4), interventions=Trip()))
                .result()
                .choices[0]
                .text
            )
        except Fault as fault:
            return str(fault)

    with ThreadPoolExecutor(8) as threads:
        leaving = [threads.submit(leave, number) for number in (0, 1, 5)]
        tripped = threads.submit(trip)
        answers = {
            name: threads.submit(lambda request=request: engine.submit(request).result())
            for name, request in requests.items()
        }
        answers_by_name = {name: said(answer.result()) for name, answer in answers.items()}
        for one_left in leaving:
            one_left.result()
    return {"together": answers_by_name, "tripped": tripped.result()}


def split(rank: int, port: int, folder: Path, model: Path) -> None:
    names = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": 2,
        "LOCAL_WORLD_SIZE": 2,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ.update({name: str(value) for name, value in names.items()})
    torch.set_num_threads(1)
    tensor_parallel.TOGETHER = tensor_parallel.timedelta(seconds=2)
    register(Trip, TripSlots)
    mllm = steering.load(model, tensor_parallel=2)
    engine = Engine(mllm, slots=6, max_length=512, prefill_budget=80, prefix_cache_bytes=ROOM)
    if mllm.ranks.rank:
        engine.follow()
    else:
        all_requests = requests(mllm)
        report = {
            "answers": told(engine, all_requests),
            "again": told(engine, all_requests),
            "cached": engine.stats()["prefix_cache_tokens"],
            "fingerprint": mllm.fingerprint,
            "kv_bytes": engine.stats()["kv_bytes"],
        }
        engine.start()
        report |= together(
            engine, {name: all_requests[name] for name in ("plain", "steered", "all of sage", "pai", "grammar")}
        )
        engine.stop(drain=10)
        report["threads"] = [thread.name for thread in threading.enumerate() if thread.name == "helmsight-engine"]
        (folder / "said.json").write_text(json.dumps(report, default=list))
    Engine(steering.load(model, tensor_parallel=2, dtype="bfloat16"), slots=2, max_length=256)  # which is checked
    engine = Engine(mllm, slots=2, max_length=256, self_check=False)
    if mllm.ranks.rank:
        try:
            engine.follow()
        except RuntimeError as error:
            (folder / "second.txt").write_text(str(error))
            os._exit(0)  # as a process that died; torchrun would end the other one if it knew
    engine.start()
    try:
        engine.submit(Request(chat(), Sampling(max_tokens=9), interventions=Trip(everywhere=False))).result()
    except Fault as fault:
        (folder / "first.txt").write_text(f"{engine.healthy} {fault}")
    os._exit(0)
