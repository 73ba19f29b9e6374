"""The unattended training run: `train(options)` trains the embedded model from nothing, or resumes where it stopped.

Stages: tokenizer, vision tower alone, then the language model on packed questions with the tower frozen. Everything
depends on the seed and on step numbers, never on the clock. `helmsight demo train` is the command.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from tqdm import tqdm
from transformers import Qwen2VLForConditionalGeneration

from demo.batches import Batches, question_results
from demo.curriculum import TYPES, corpus
from demo.forward import logits_at, look_loss, picture_loss, text_hidden
from demo.model import export, make_config, new_model, trainable_matrices, transplant
from demo.muon import Muon
from demo.options import PLAN_EVERY, Options, learning_rate, use_bfloat16
from demo.record import Log, Record
from demo.tokenizer import load_tokenizer, train_tokenizer
from demo.vision import adapt_vision, train_vision

PICTURE_LAYERS = (4, 5, 6, 7)  # layers whose attention over pictures is supervised
READ_LAYER, COMPARE_LAYER = 3, 1  # layers where a few heads are shown the cell to read, the cell to compare with


def train(options: Options) -> Path:
    """Run or resume; returns the folder of the exported checkpoint."""
    options.folder.mkdir(parents=True, exist_ok=True)
    prepare(options)
    if options.ranks == 1:
        run_rank(0, options)
    else:
        rendezvous = options.folder / "rendezvous"
        rendezvous.unlink(missing_ok=True)
        spawn(run_rank, (options,), nprocs=options.ranks)
    return options.folder / "checkpoint"


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


def save_atomically(content: Any, path: Path) -> None:
    fresh = path.with_name(path.name + ".new")
    torch.save(content, fresh)
    os.replace(fresh, path)


def losses(
    model: Qwen2VLForConditionalGeneration, batch: dict[str, Tensor], options: Options
) -> tuple[Tensor, Tensor, Tensor]:
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
        batch = {k: torch.from_numpy(v).to(device) for k, v in arrays.items() if k != "kinds"}
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


def card(options: Options, step: int) -> str:
    """The model card of a checkpoint that has not been evaluated yet."""
    return f"# Helmsight demo model\n\nStep {step} of {options.steps}, seed {options.seed}; not evaluated yet.\n"
