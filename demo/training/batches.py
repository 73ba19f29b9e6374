"""The batches of one rank, made ahead of time in another process, and the results of their questions."""

from __future__ import annotations

import multiprocessing
import os
import queue
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from demo.model.tokenizer import load_tokenizer
from demo.training.curriculum import TYPES, make_plan
from demo.training.options import PLAN_EVERY, TrainingOptions
from demo.training.stream import Packer


def produce(options: TrainingOptions, rank: int, first: int, accuracies: Any, batches: Any) -> None:
    """Make batches first, first + 1, ... for ever; every `PLAN_EVERY` batches take the next accuracies."""
    torch.set_num_threads(1)
    packer = Packer(load_tokenizer(options.folder / "tokenizer"), options.shape, options.course.sight)
    parent, index = os.getppid(), first
    plan = make_plan({}, options.course)
    while True:
        if index % PLAN_EVERY == 0:
            plan = make_plan(accuracies.get(), options.course)
        batch = packer.batch(options.seed, rank, index, plan)
        while True:
            try:
                batches.put(batch, timeout=20)
                break
            except queue.Full:
                if os.getppid() != parent:
                    return
        index += 1


class Batches:
    """The batches of one rank from a step on.

    Batch i is made with the accuracies known `PLAN_EVERY` steps before its block of `PLAN_EVERY` began, so that making
    it ahead of time and resuming give the same batch.
    """

    def __init__(self, options: TrainingOptions, rank: int, first: int, accuracy: dict[str, float]) -> None:
        self.process: Any = None
        if options.background:
            context = multiprocessing.get_context("spawn")
            self.accuracies, self.batches = context.Queue(), context.Queue(8)
            arguments = (options, rank, first, self.accuracies, self.batches)
            self.process = context.Process(target=produce, args=arguments, daemon=True)
            self.accuracies.put(dict(accuracy))
            self.process.start()
        else:
            self.packer = Packer(load_tokenizer(options.folder / "tokenizer"), options.shape, options.course.sight)
            self.options, self.rank, self.index = options, rank, first
            self.snapshots = [dict(accuracy)]
            self.plan = make_plan({}, options.course)

    def tell(self, accuracy: dict[str, float]) -> None:
        """Give the accuracies for the block after the next; to be called at every multiple of `PLAN_EVERY`."""
        if self.process is not None:
            self.accuracies.put(dict(accuracy))
        else:
            self.snapshots.append(dict(accuracy))

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        while True:
            if self.process is not None:
                yield self.batches.get()
                continue
            if self.index % PLAN_EVERY == 0:
                self.plan = make_plan(self.snapshots.pop(0), self.options.course)
            yield self.packer.batch(self.options.seed, self.rank, self.index, self.plan)
            self.index += 1

    def close(self) -> None:
        if self.process is not None:
            self.process.terminate()


def question_results(batch: dict[str, np.ndarray], right: np.ndarray) -> np.ndarray:
    """Return the questions answered exactly right and the questions asked, (types, 2)."""
    kinds = batch["kinds"]
    real = batch["weight"] > 0
    wrong = np.zeros(len(kinds) + 1, bool)
    wrong[batch["question"][real & ~right]] = True
    is_question = kinds >= 0
    counts = np.zeros((len(TYPES), 2), np.float32)
    np.add.at(
        counts,
        kinds[is_question],
        np.stack([~wrong[:-1][is_question], np.ones(is_question.sum(), bool)], -1).astype(np.float32),
    )
    return counts
