"""The unattended training run: `train(options)` trains the embedded model from nothing, or resumes where it stopped.

Stages: tokenizer, vision tower alone, then the language model on packed questions with the tower frozen. Everything
depends on the seed and on step numbers, never on the clock. `helmsight demo train` is the command.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from tqdm import tqdm
from transformers import Qwen2VLForConditionalGeneration

from demo import located
from demo.model.embedded import export, make_config, new_model, trainable_matrices
from demo.model.forward import logits_at, look_loss, picture_loss, side_loss, text_hidden
from demo.model.tokenizer import load_tokenizer, train_tokenizer
from demo.training.batches import Batches, question_results
from demo.training.card import card, settings
from demo.training.curriculum import TYPES, corpus
from demo.training.muon import Muon
from demo.training.options import PLAN_EVERY, TrainingOptions, learning_rate, use_bfloat16
from demo.training.record import Log, Record
from demo.training.stream import COMPARE, PICK, READ, SECOND
from demo.training.vision import train_vision

PICTURE_LAYERS = (4, 5, 6, 7)  # layers whose attention over pictures is supervised
# Heads by layer whose attention is supervised, and the weight of that loss: two heads of each group read what the
# picture and the context say, two pick the option, one compares the second picture with the first.
LOOK_HEADS = (
    (READ, 3, slice(0, 2), 1.0),
    (SECOND, 3, slice(3, 5), 1.0),
    (PICK, 5, slice(0, 2), 1.0),
    (COMPARE, 1, slice(3, 4), 0.5),
)
SIDE_LAYER = 3  # the side that an instruction names is known after this layer, before options are picked


def train(options: TrainingOptions) -> Path:
    """Run or resume a training; return the folder of the exported checkpoint."""
    options.folder.mkdir(parents=True, exist_ok=True)
    prepare(options)
    if options.ranks == 1:
        run_rank(0, options)
    else:
        rendezvous = options.folder / "rendezvous"
        rendezvous.unlink(missing_ok=True)
        spawn(run_rank, (options,), nprocs=options.ranks)
    return options.folder / "checkpoint"


def prepare(options: TrainingOptions) -> None:
    """Make the tokenizer and the initial weights unless an earlier run left them.

    The weights are the vision stage's or another model's.
    """
    torch.set_num_threads(max(1, options.ranks))
    tokenizer_folder, start = options.folder / "tokenizer", options.start and located(options.start)
    if not (tokenizer_folder / "tokenizer.json").exists():
        built = load_tokenizer(start) if start else train_tokenizer(corpus(6000))
        built.save_pretrained(tokenizer_folder)
    tokenizer = load_tokenizer(tokenizer_folder)
    path = options.folder / "initial.pt"
    if path.exists():
        return
    if start:
        begun = Qwen2VLForConditionalGeneration.from_pretrained(start, dtype=torch.float32)
        save_atomically(begun.state_dict(), path)
        return
    device, log = torch.device(options.device), Log(options.folder)
    progress = tqdm(total=options.vision_steps, desc="vision stage", mininterval=10)

    def report(step: int, values: dict[str, float]) -> None:
        progress.update(step - progress.n)
        log.line(f"vision step {step} " + " ".join(f"{k} {v:.4f}" for k, v in values.items()))

    model = new_model(make_config(tokenizer, options.hidden, options.layers), options.seed).to(device)
    bfloat16 = use_bfloat16(options)
    train_vision(
        model, tokenizer, options.seed, options.vision_steps, device, options.compiled, bfloat16, report,
        options.course.habits,
    )  # fmt: skip
    progress.close()
    save_atomically(model.state_dict(), path)


def save_atomically(content: Any, path: Path) -> None:
    """Save with torch so that readers see the old file or the whole new one."""
    fresh = path.with_name(path.name + ".new")
    torch.save(content, fresh)
    os.replace(fresh, path)


@dataclass
class Progress:
    """The progress of a run.

    It holds steps, questions asked, seconds spent, and the running accuracy per type, now and `PLAN_EVERY` steps ago.
    """

    step: int = 0
    asked: int = 0
    seconds: float = 0.0
    accuracy: dict[str, float] = field(default_factory=dict)
    previous: dict[str, float] = field(default_factory=dict)

    def count(self, counts: Tensor) -> None:
        """Add a step's (types, 2) right and asked; the accuracies forget 2 % per question."""
        self.step += 1
        for name, (right, total) in zip(TYPES, counts.tolist(), strict=True):
            if total:
                keep = 0.98**total
                self.accuracy[name] = keep * self.accuracy.get(name, 0.0) + (1 - keep) * right / total
                self.asked += int(total)


def losses(
    model: Qwen2VLForConditionalGeneration, batch: dict[str, Tensor], options: TrainingOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the total loss, its parts (answers, pictures, looks, sides), and for each answer token whether it is right."""
    layers = len(model.model.language_model.layers)
    picture_layers = tuple(layer for layer in PICTURE_LAYERS if layer < layers)
    states, weights_by_layer = text_hidden(model, batch, (*picture_layers, *(layer for _, layer, _, _ in LOOK_HEADS)))
    logits = logits_at(model, states[-1], batch["source"]).float()
    token_losses = F.cross_entropy(logits, batch["label"], reduction="none")
    answers = (token_losses * batch["weight"]).sum() / batch["weight"].sum()
    pictures = torch.stack([picture_loss(weights_by_layer[layer], batch) for layer in picture_layers]).mean()
    look = batch["look"]
    terms = [
        weight * look_loss(weights_by_layer[layer][:, heads], look[head]) for head, layer, heads, weight in LOOK_HEADS
    ]
    looks = torch.stack(terms).sum()
    sides = side_loss(model, states[SIDE_LAYER], batch["side"], batch["side_words"])
    total = answers + options.picture_weight * pictures + options.look_weight * looks + options.side_weight * sides
    return total, torch.stack([answers, pictures, looks, sides]).detach(), logits.argmax(-1) == batch["label"]


@contextlib.contextmanager
def only_run(folder: Path) -> Iterator[None]:
    """Hold a folder's lock, so that two runs never share it; raise RuntimeError where another run holds it."""
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RuntimeError(f"another run is using {folder}") from error
        yield


def run_rank(rank: int, options: TrainingOptions) -> None:
    """Train as one of `options.ranks` data-parallel ranks; rank 0 holds the folder's lock."""
    with only_run(options.folder) if rank == 0 else contextlib.nullcontext():
        train_rank(rank, options)


def train_rank(rank: int, options: TrainingOptions) -> None:
    """Run the training loop of one rank, which ends when the process that started it is gone."""
    torch.set_num_threads(1)
    parent = os.getppid()
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
    side_words = torch.tensor([tokenizer.encode(word)[0] for word in (" text", " image")], device=device)

    progress, state_path = Progress(), options.folder / "state.pt"
    if state_path.exists():
        state = torch.load(state_path, map_location=device, weights_only=False)
        model.load_state_dict(state["model"])
        muon.load_state_dict(state["muon"])
        adam.load_state_dict(state["adam"])
        progress = Progress(**state["progress"])

    def save() -> None:
        state = {"model": model.state_dict(), "muon": muon.state_dict(), "adam": adam.state_dict()}
        save_atomically(state | {"progress": asdict(progress)}, state_path)
        about = card(options, progress.step, progress.asked, sum(parameter.numel() for parameter in model.parameters()))
        spent = {"steps": progress.step, "questions": progress.asked, "minutes": round(progress.seconds / 60, 1)}
        export(model, tokenizer, options.folder / "checkpoint", about, settings(options) | {"training": spent})

    batches = Batches(options, rank, progress.step, progress.previous)
    run = torch.compile(losses, dynamic=False) if options.compiled else losses
    record = Record(options, rank, progress.step)
    saved = last = time.monotonic()
    for arrays in batches:
        if progress.step >= options.steps:
            break
        if options.ranks > 1 and os.getppid() != parent:
            raise RuntimeError("the process that started this rank is gone")
        if progress.step % PLAN_EVERY == 0:
            if rank == 0 and time.monotonic() - saved > options.save_minutes * 60:
                save()
                saved = time.monotonic()
            progress.previous = dict(progress.accuracy)
            batches.tell(progress.previous)
        batch = {k: torch.from_numpy(v).to(device) for k, v in arrays.items() if k != "kinds"}
        batch["side_words"] = side_words
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bfloat16):
            loss, parts, right = run(model, batch, options)
        loss.backward()
        counts = torch.from_numpy(question_results(arrays, right.cpu().numpy()))
        counts, parts = share(parameters, counts, parts.cpu(), options.ranks)
        rate = learning_rate(progress.step, options)
        nn.utils.clip_grad_norm_([*vectors, embeddings], 1.0)
        for group in adam.param_groups:
            group["lr"] = options.vector_rate * rate * group["scale"]
        adam.step()
        muon.step(options.matrix_rate * rate)
        model.zero_grad(set_to_none=True)
        progress.count(counts)
        record.step(progress.step, rate, parts, counts)
        last, before = time.monotonic(), last
        progress.seconds += last - before
    batches.close()
    if rank == 0:
        save()
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
    sums = flat[offset:]
    return sums[: counts.numel()].view_as(counts), sums[counts.numel() :] / ranks
