"""The unattended training run: `train(options)` trains the embedded model from nothing, or resumes where it stopped.

Stages: tokenizer, vision tower alone, then the language model on packed questions with the tower frozen. Everything
depends on the seed and on step numbers, never on the clock. `helmsight demo train` is the command.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import queue
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from demo.curriculum import TYPES, corpus, make_plan
from demo.forward import logits_at, look_loss, picture_loss, text_hidden
from demo.model import export, make_config, new_model, trainable_matrices, transplant
from demo.muon import Muon
from demo.stream import Packer, Shape
from demo.tokenizer import load_tokenizer, train_tokenizer
from demo.vision import adapt_vision, train_vision

PICTURE_LAYERS = (4, 5, 6, 7)  # layers whose attention over pictures is supervised
READ_LAYER, COMPARE_LAYER = 3, 1  # layers where a few heads are shown the cell to read, the cell to compare with
PLAN_EVERY = 25  # steps between two looks at the accuracies
BATCH_KEYS_LEFT_OUT = ("kinds",)


@dataclass(frozen=True)
class Options:
    """Everything that decides a run. Steps count optimizer steps of all ranks together."""

    folder: Path = Path("build/demo")
    steps: int = 18_000
    seed: int = 1
    start: Path | None = None  # go on from this checkpoint's weights instead of from nothing
    vision_steps: int = 700
    decay: float = 0.3  # last share of the steps, in which the learning rate falls to zero
    matrix_rate: float = 2e-3
    vector_rate: float = 1.5e-3
    embedding_scale: float = 0.2
    picture_weight: float = 0.05
    look_weight: float = 0.1
    ranks: int = 2
    device: str = "cpu"
    compiled: bool = True
    bfloat16: bool | None = None  # None: where the machine multiplies it faster than float32
    background: bool = True  # make batches in a process of their own
    save_minutes: float = 3.0
    log_every: int = 100
    shape: Shape = Shape()
    hidden: int = 192
    layers: int = 8

    def __post_init__(self) -> None:
        if self.steps % PLAN_EVERY:
            raise ValueError(f"steps {self.steps}: must be a multiple of {PLAN_EVERY}")
        if self.steps < 1 or self.ranks < 1:
            raise ValueError(f"steps {self.steps}, ranks {self.ranks}: both must be at least 1")
        if self.ranks > 1 and self.device != "cpu":
            raise ValueError(f"ranks {self.ranks} on {self.device}: several ranks are for the CPU")


def train(options: Options) -> Path:
    """Run or resume; returns the folder of the exported checkpoint."""
    options.folder.mkdir(parents=True, exist_ok=True)
    prepare(options)
    if options.ranks == 1:
        run_rank(0, options)
    else:
        rendezvous = options.folder / "rendezvous"
        rendezvous.unlink(missing_ok=True)
        torch.multiprocessing.spawn(run_rank, (options,), nprocs=options.ranks)
    return options.folder / "checkpoint"


def use_bfloat16(options: Options) -> bool:
    """bfloat16 products pay on GPUs and on CPUs with AMX tiles; AVX512-BF16 alone is slower than float32 (measured)."""
    if options.bfloat16 is not None:
        return options.bfloat16
    return options.device != "cpu" or torch.cpu._is_amx_tile_supported()


def learning_rate(step: int, options: Options) -> float:
    """Share of the full rate: a short warm-up, flat, then a cosine to zero over the last `decay` of the steps."""
    start = options.steps * (1 - options.decay)
    warm = min(1.0, (step + 1) / 100)
    if step < start:
        return warm
    return warm * max(0.01, 0.5 * (1 + math.cos(math.pi * (step - start) / (options.steps - start))))


def prepare(options: Options) -> None:
    """Make the tokenizer and the vision stage's weights, unless an earlier run left them."""
    torch.set_num_threads(max(1, options.ranks))
    tokenizer_folder = options.folder / "tokenizer"
    if not (tokenizer_folder / "tokenizer.json").exists():
        train_tokenizer(corpus(6000)).save_pretrained(tokenizer_folder)
    tokenizer = load_tokenizer(tokenizer_folder)
    path = options.folder / "initial.pt"
    if path.exists():
        return
    device, log = torch.device(options.device), Log(options.folder)
    progress = tqdm(total=options.vision_steps, desc="vision stage", mininterval=10)

    def report(step: int, values: dict[str, float]) -> None:
        progress.update(step - progress.n)
        log.line(f"vision step {step} " + " ".join(f"{k} {v:.4f}" for k, v in values.items()))

    how = (options.seed, options.vision_steps, device, options.compiled, use_bfloat16(options), report)
    if options.start is not None:
        model = transplant(options.start, tokenizer).to(device)
        adapt_vision(model, *how)
    else:
        model = new_model(make_config(tokenizer, options.hidden, options.layers), options.seed).to(device)
        train_vision(model, tokenizer, *how)
    progress.close()
    save_atomically(model.state_dict(), path)


class Log:
    """Lines with the time, appended to log.txt in the run's folder."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "log.txt"

    def line(self, text: str) -> None:
        with self.path.open("a") as file:
            file.write(f"{time.strftime('%H:%M:%S')} {text}\n")


def save_atomically(content: Any, path: Path) -> None:
    fresh = path.with_name(path.name + ".new")
    torch.save(content, fresh)
    os.replace(fresh, path)


# ------------------------------------------------------------------------------------------------- batches


def produce(options: Options, rank: int, first: int, accuracies: Any, batches: Any) -> None:
    """Make batches first, first + 1, ... for ever; every `PLAN_EVERY` batches take the next accuracies."""
    torch.set_num_threads(1)
    packer = Packer(load_tokenizer(options.folder / "tokenizer"), options.shape)
    parent, index = os.getppid(), first
    plan = make_plan({})
    while True:
        if index % PLAN_EVERY == 0:
            plan = make_plan(accuracies.get())
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

    def __init__(self, options: Options, rank: int, first: int, accuracy: dict[str, float]) -> None:
        self.process: Any = None
        if options.background:
            context = multiprocessing.get_context("spawn")
            self.accuracies, self.batches = context.Queue(), context.Queue(8)
            arguments = (options, rank, first, self.accuracies, self.batches)
            self.process = context.Process(target=produce, args=arguments, daemon=True)
            self.accuracies.put(dict(accuracy))
            self.process.start()
        else:
            self.packer = Packer(load_tokenizer(options.folder / "tokenizer"), options.shape)
            self.options, self.rank, self.index = options, rank, first
            self.snapshots = [dict(accuracy)]
            self.plan = make_plan({})

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
                self.plan = make_plan(self.snapshots.pop(0))
            yield self.packer.batch(self.options.seed, self.rank, self.index, self.plan)
            self.index += 1

    def close(self) -> None:
        if self.process is not None:
            self.process.terminate()


# ------------------------------------------------------------------------------------------------- one rank


def losses(model: nn.Module, batch: dict[str, Tensor], options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """The total loss, its three parts (answers, pictures, looks), and for each answer token whether it is right."""
    layers = len(model.model.language_model.layers)
    picture_layers = tuple(layer for layer in PICTURE_LAYERS if layer < layers)
    hidden, seen = text_hidden(model, batch, tuple({*picture_layers, READ_LAYER, COMPARE_LAYER}))
    logits = logits_at(model, hidden, batch["source"]).float()
    each = F.cross_entropy(logits, batch["label"], reduction="none")
    answers = (each * batch["weight"]).sum() / batch["weight"].sum()
    pictures = torch.stack([picture_loss(seen[layer], batch) for layer in picture_layers]).mean()
    read, look = seen[READ_LAYER], batch["look"]
    looks = look_loss(read[:, 0:2], look[0]) + look_loss(read[:, 3:5], look[1]) * 0.5
    looks = looks + look_loss(seen[COMPARE_LAYER][:, 3:4], look[2]) * 0.5
    total = answers + options.picture_weight * pictures + options.look_weight * looks
    return total, torch.stack([answers, pictures, looks]).detach(), logits.argmax(-1) == batch["label"]


def question_results(batch: dict[str, np.ndarray], right: np.ndarray) -> np.ndarray:
    """(types, 2): questions answered exactly right and questions asked, per type."""
    kinds = batch["kinds"]
    real = batch["weight"] > 0
    wrong = np.zeros(len(kinds) + 1, bool)
    wrong[batch["question"][real & ~right]] = True
    asked = kinds >= 0
    counts = np.zeros((len(TYPES), 2), np.float32)
    np.add.at(counts, kinds[asked], np.stack([~wrong[:-1][asked], np.ones(asked.sum(), bool)], -1).astype(np.float32))
    return counts


def run_rank(rank: int, options: Options) -> None:
    """Train as one of `options.ranks` data-parallel ranks."""
    torch.set_num_threads(1)
    if options.ranks > 1:
        file = (options.folder / "rendezvous").resolve()
        dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=options.ranks)
    device, bfloat16 = torch.device(options.device), use_bfloat16(options)
    tokenizer = load_tokenizer(options.folder / "tokenizer")
    model = new_model(make_config(tokenizer, options.hidden, options.layers), options.seed)
    model.load_state_dict(torch.load(options.folder / "initial.pt", map_location="cpu"))
    model.to(device)
    model.model.visual.requires_grad_(False)
    matrices, vectors, embeddings = trainable_matrices(model)
    muon = Muon(matrices, rank=rank, ranks=options.ranks)
    groups = [{"params": vectors, "scale": 1.0}, {"params": [embeddings], "scale": options.embedding_scale}]
    adam = torch.optim.AdamW(groups, lr=options.vector_rate, betas=(0.9, 0.98), weight_decay=0.01)
    parameters = [*matrices, *vectors, embeddings]

    state_path = options.folder / "state.pt"
    step, accuracy, previous = 0, dict[str, float](), dict[str, float]()
    if state_path.exists():
        state = torch.load(state_path, map_location=device, weights_only=False)
        model.load_state_dict(state["model"])
        muon.load_state_dict(state["muon"])
        adam.load_state_dict(state["adam"])
        step, accuracy, previous = state["step"], state["accuracy"], state["previous"]
    batches = Batches(options, rank, step, previous)
    run = torch.compile(losses, dynamic=False) if options.compiled else losses
    record = Record(options, rank, step)
    saved = time.monotonic()
    for arrays in batches:
        if step >= options.steps:
            break
        if step % PLAN_EVERY == 0:
            late = time.monotonic() - saved > options.save_minutes * 60
            if rank == 0 and late:
                state = {"model": model.state_dict(), "muon": muon.state_dict(), "adam": adam.state_dict()}
                state |= {"step": step, "accuracy": accuracy, "previous": previous}
                save_atomically(state, state_path)
                export(model, tokenizer, options.folder / "checkpoint", card(options, step))
                saved = time.monotonic()
            previous = dict(accuracy)
            batches.tell(previous)
        batch = {k: torch.from_numpy(v).to(device) for k, v in arrays.items() if k not in BATCH_KEYS_LEFT_OUT}
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bfloat16):
            loss, parts, right = run(model, batch, options)
        loss.backward()
        counts = torch.from_numpy(question_results(arrays, right.cpu().numpy()))
        counts, parts = share(parameters, counts, parts.cpu(), options.ranks)
        rate = learning_rate(step, options)
        nn.utils.clip_grad_norm_([*vectors, embeddings], 1.0)
        for group in adam.param_groups:
            group["lr"] = options.vector_rate * rate * group["scale"]
        adam.step()
        muon.step(options.matrix_rate * rate)
        model.zero_grad(set_to_none=True)
        for name, (right_count, asked) in zip(TYPES, counts.tolist(), strict=True):
            if asked:
                keep = 0.98**asked
                accuracy[name] = keep * accuracy.get(name, 0.0) + (1 - keep) * right_count / asked
        step += 1
        record.step(step, rate, parts, counts)
    batches.close()
    if rank == 0:
        state = {"model": model.state_dict(), "muon": muon.state_dict(), "adam": adam.state_dict()}
        state |= {"step": step, "accuracy": accuracy, "previous": previous}
        save_atomically(state, state_path)
        export(model, tokenizer, options.folder / "checkpoint", card(options, step))
    if options.ranks > 1:
        dist.destroy_process_group()


def share(parameters: list[nn.Parameter], counts: Tensor, parts: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    """Average gradients and loss parts over the ranks and add up the counts, in one all-reduce."""
    if ranks == 1:
        return counts, parts
    grads = [p.grad for p in parameters if p.grad is not None]
    flat = torch.cat([g.flatten() for g in grads] + [counts.flatten(), parts.float()])
    dist.all_reduce(flat)
    offset = 0
    for grad in grads:
        grad.copy_(flat[offset : offset + grad.numel()].view_as(grad)).div_(ranks)
        offset += grad.numel()
    rest = flat[offset:]
    return rest[: counts.numel()].view_as(counts), rest[counts.numel() :] / ranks


class Record:
    """Progress of rank 0: a bar, a line and a history entry every `log_every` steps."""

    def __init__(self, options: Options, rank: int, step: int) -> None:
        self.every = options.log_every
        self.rank, self.folder, self.log = rank, options.folder, Log(options.folder)
        self.bar = tqdm(total=options.steps, initial=step, desc="training", mininterval=10, disable=rank > 0)
        self.parts, self.counts, self.steps, self.since = (
            torch.zeros(3),
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


def card(options: Options, step: int) -> str:
    """The model card of a checkpoint that has not been evaluated yet."""
    return f"# Helmsight demo model\n\nStep {step} of {options.steps}, seed {options.seed}; not evaluated yet.\n"
