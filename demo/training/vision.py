"""The first stage: the vision encoder learns, alone, the content of each cell.

Every merged token classifies its cell's kind and colour, the background and its own place. The class vectors of kinds,
colours and backgrounds are the language model's word embeddings, so that image tokens match them from the start.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen2VLForConditionalGeneration

from demo.model.forward import vision_features
from demo.training.muon import Muon
from demo.training.stream import picture
from demo.world.scenes import BACKGROUNDS, COLOURS, DIGITS, EVEN, LETTERS, SHAPES, Habits, Scene, random_scene

KINDS = SHAPES + LETTERS + DIGITS
COLOUR_NAMES, BACKGROUND_NAMES = tuple(COLOURS), tuple(BACKGROUNDS)
BATCH = 64


def cell_labels(scene: Scene) -> np.ndarray:
    """Return class numbers (9, 3): kind and colour (the last class of each is 'empty'), background."""
    labels = np.empty((9, 3), np.int64)
    labels[:] = (len(KINDS), len(COLOUR_NAMES), BACKGROUND_NAMES.index(scene.background))
    for thing in scene.things:
        labels[thing.cell, :2] = KINDS.index(thing.kind), COLOUR_NAMES.index(thing.colour)
    return labels


def vision_batch(seed: int, index: int, habits: Habits = EVEN) -> tuple[Tensor, Tensor]:
    """Return pixels (64, 36, 588) uint8 and labels (64 * 9, 3), which depend on (seed, index) only."""
    rng = random.Random(f"vision {seed} {index}")
    scenes = [
        random_scene(rng, rng.choice((1, 2, 3, 4, 5, 6, 7)), rng.random() < 0.6, held_out=False, habits=habits)
        for _ in range(BATCH)
    ]
    pixels = np.stack([picture(rng, scene) for scene in scenes])
    return torch.from_numpy(pixels), torch.from_numpy(np.concatenate([cell_labels(scene) for scene in scenes]))


class CellHeads(nn.Module):
    """Parameters of the classification besides the word embeddings: two 'empty' vectors, a place head, a background map."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.randn(2, hidden) * 0.07)
        self.place = nn.Linear(hidden, 9, bias=False)
        self.background = nn.Linear(hidden, hidden, bias=False)
        nn.init.eye_(self.background.weight)


def train_vision(
    model: Qwen2VLForConditionalGeneration,
    tokenizer: PreTrainedTokenizerFast,
    seed: int,
    steps: int,
    device: torch.device,
    compiled: bool = True,
    bfloat16: bool = False,
    report: Callable[[int, dict[str, float]], None] = lambda step, values: None,
    habits: Habits = EVEN,
) -> None:
    """Train `model`'s vision encoder and word embeddings in place; `report` gets accuracies every 50 steps."""
    torch.manual_seed(seed)
    visual, embeddings = model.model.visual, model.model.language_model.embed_tokens.weight
    heads = CellHeads(model.config.text_config.hidden_size).to(device)
    names = {
        word: tokenizer.encode(" " + word, add_special_tokens=False)[-1] for word in (*KINDS, *COLOURS, *BACKGROUNDS)
    }
    kind_ids, colour_ids, background_ids = (
        torch.tensor([names[word] for word in words], device=device)
        for words in (KINDS, COLOUR_NAMES, BACKGROUND_NAMES)
    )
    muon, adam = tower_optimizers(visual, [embeddings, *heads.parameters()])

    def loss_of(pixels: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        features = vision_features(visual, pixels).float()
        normed = F.rms_norm(features, features.shape[-1:])  # what the first layer's norm will see
        kind = 2 * normed @ torch.cat([embeddings[kind_ids], heads.empty[:1]]).T
        colour = 2 * normed @ torch.cat([embeddings[colour_ids], heads.empty[1:]]).T
        background = 2 * heads.background(normed) @ embeddings[background_ids].T
        place = torch.arange(9, device=pixels.device).repeat(pixels.shape[0])
        logits = (kind.float(), colour.float(), background.float())
        loss = F.cross_entropy(logits[0], labels[:, 0]) + F.cross_entropy(logits[1], labels[:, 1])
        loss = loss + 0.3 * F.cross_entropy(logits[2], labels[:, 2])
        loss = loss + 0.5 * F.cross_entropy(heads.place(normed).float(), place)
        loss = loss + 1e-3 * (features.pow(2).mean(-1) - 0.02).clamp(min=0).mean()
        filled = labels[:, 0] < len(KINDS)
        right = torch.stack([(x.argmax(-1) == labels[:, i]) for i, x in enumerate(logits)], -1)
        return loss, right & filled[:, None], features.norm(dim=-1).mean()

    run = torch.compile(loss_of, dynamic=False) if compiled else loss_of
    for step in range(steps):
        pixels, labels = (x.to(device) for x in vision_batch(seed, step, habits))
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bfloat16):
            loss, right, norm = run(pixels, labels)
        loss.backward()
        update(muon, adam, step, steps)
        model.zero_grad(set_to_none=True)
        if step % 50 == 49 or step == steps - 1:
            report(
                step + 1,
                {
                    "loss": loss.item(),
                    "right": right.float().sum().item() / max(1, (labels[:, 0] < len(KINDS)).sum().item() * 3),
                },
            )
    with torch.no_grad():  # image tokens get one and a half times the norm of word embeddings
        scale = 1.5 * embeddings.norm(dim=-1).mean() / norm
        visual.merger.mlp[2].weight *= scale
        visual.merger.mlp[2].bias *= scale


def tower_optimizers(visual: Any, parameters: Sequence[nn.Parameter] = ()) -> tuple[Muon, torch.optim.Optimizer]:
    """Return Muon for the encoder's matrices, AdamW for the rest; the patch weights, which see raw pixels, move less."""
    muon = Muon(p for p in visual.parameters() if p.dim() == 2)
    vectors = [p for p in visual.parameters() if p.dim() == 1]
    groups = [
        {"params": [*vectors, *parameters], "scale": 1.0},
        {"params": [visual.patch_embed.proj.weight], "scale": 0.15},
    ]
    return muon, torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.98), weight_decay=0.0)


def update(muon: Muon, adam: torch.optim.Optimizer, step: int, steps: int) -> None:
    """Update both optimizers' parameters: warm-up over 50 steps, flat for the first half, then linear to nearly zero."""
    progress = step / steps
    rate = min(1.0, (step + 1) / 50) * (1.0 if progress < 0.5 else max(0.02, 2 * (1 - progress)))
    for group in adam.param_groups:
        group["lr"] = 2e-3 * rate * group["scale"]
    adam.step()
    muon.step(3e-3 * rate)
    adam.zero_grad(set_to_none=True)
