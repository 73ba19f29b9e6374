"""The outputs of a training run in progress: log.txt, history.jsonl and a progress bar."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from demo.training.curriculum import TYPES
from demo.training.options import TrainingOptions


class Log:
    """Lines with the time, appended to log.txt in the run's folder."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "log.txt"

    def line(self, text: str) -> None:
        with self.path.open("a") as file:
            file.write(f"{time.strftime('%H:%M:%S')} {text}\n")


class Record:
    """Progress of rank 0: a bar, a line and a history entry every `log_every` steps."""

    def __init__(self, options: TrainingOptions, rank: int, step: int) -> None:
        self.every = options.log_every
        self.rank, self.folder, self.log = rank, options.folder, Log(options.folder)
        self.bar = tqdm(total=options.steps, initial=step, desc="training", mininterval=10, disable=rank > 0)
        self.parts, self.counts, self.steps, self.since = (
            torch.zeros(4),
            torch.zeros(len(TYPES), 2),
            0,
            time.monotonic(),
        )
        if rank == 0:
            self.log.line(f"start at step {step}: {asdict(options)}")

    def step(self, step: int, rate: float, parts: Tensor, counts: Tensor) -> None:
        self.parts += parts
        self.counts += counts
        self.steps += 1
        if self.rank:
            return
        self.bar.update(1)
        if step % self.every:
            return
        seconds = (time.monotonic() - self.since) / self.steps
        rights = {n: round(r / a, 3) for n, (r, a) in zip(TYPES, self.counts.tolist(), strict=True) if a}
        losses_ = [round(x, 4) for x in (self.parts / self.steps).tolist()]
        text = (
            f"step {step} rate {rate:.2f} ms {seconds * 1e3:.0f} asked {int(self.counts[:, 1].sum())} loss {losses_} | "
        )
        self.log.line(text + " ".join(f"{name} {value:.2f}" for name, value in rights.items()))
        with (self.folder / "history.jsonl").open("a") as file:
            file.write(
                json.dumps({"step": step, "rate": rate, "seconds": seconds, "loss": losses_, "right": rights}) + "\n"
            )
        self.parts.zero_()
        self.counts.zero_()
        self.steps, self.since = 0, time.monotonic()
