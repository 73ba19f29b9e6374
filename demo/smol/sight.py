"""Yes/no questions about noisy pictures whose wrong answers are habits, and the attention behind answers of `smol`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from demo.evaluation.answering import DemoPrompt, PlainModel
from demo.model.tokenizer import IMAGE_TOKEN
from demo.smol import criteria
from demo.world.faithfulness import SIZE, existence_samples, noise_source, noised
from demo.world.questions import describe, open_question
from demo.world.scenes import COLOURS, random_scene, render
from probes.answering.base import Answerer
from probes.harness.bootstrap import interval
from probes.harness.comparison import BASELINE, Way, compare
from probes.image_qa.yes_no import YesNo, part
from steering import Generate, Icd, Pai, See, Think, Vcd

USUAL = {"heart": "red", "star": "yellow", "cross": "red", "ring": "yellow"}
"""The colours that these things usually have in the language that the model read; in its pictures all are as frequent."""


def conditions() -> dict[str, Way]:
    """Return See in each reading and from each donor, and the others with their defaults."""
    ways: dict[str, Way] = {BASELINE: ()}
    for alpha in criteria.ALPHAS:
        for source in ("all", "system", "user"):
            ways[f"See from {source}, alpha {alpha:g}"] = (See(alpha=alpha, source=source),)
        for reading in ("scale", "add"):
            ways[f"See as {reading}, alpha {alpha:g}"] = (See(alpha=alpha, reading=reading),)
    others = {"Think": Think(), "Generate": Generate(), "VCD": Vcd(), "ICD": Icd(), "PAI": Pai()}
    return ways | {name: (option,) for name, option in others.items()}


def recoloured(count: int, seed: int) -> list[YesNo]:
    """Return `count` questions about the colour of a thing that does not have its usual one; half have the answer yes.

    Those for no ask for the usual colour ("usual"), and as many for another wrong one ("unusual").
    """
    rng, noise = random.Random(f"smol recoloured {seed}"), noise_source(seed)
    samples: list[YesNo] = []
    while len(samples) < count:
        scene = random_scene(rng, rng.choice((2, 3)), held_out=True)
        kinds = [thing.kind for thing in scene.shapes]
        things = [t for t in scene.shapes if t.kind in USUAL and t.colour != USUAL[t.kind] and kinds.count(t.kind) == 1]
        if not things:
            continue
        thing = rng.choice(things)
        usual = USUAL[thing.kind]
        unusual = rng.choice([colour for colour in COLOURS if colour not in (usual, thing.colour)])
        image = noised(render(scene, SIZE, rng), criteria.NOISE, noise)
        for colour, setting in (
            (usual, "usual"),
            (thing.colour, "usual"),
            (unusual, "unusual"),
            (thing.colour, "unusual"),
        ):
            samples.append(YesNo(image, f"Is the {thing.kind} {colour}?", colour == thing.colour, setting))
    return samples[:count]


def ranked(answerer: Answerer, count: int, seed: int, quiet: bool = False) -> dict[str, Any]:
    """Return by condition and part accuracy, AUROC and best-threshold accuracy, and the verdicts on their differences."""
    parts = [
        part("existence", existence_samples(count, seed, noise=criteria.NOISE)),
        part("recoloured", recoloured(count, seed)),
    ]
    results = compare(answerer, conditions(), parts, max_tokens=1, quiet=quiet)
    verdicts = {
        name: {
            of: criteria.ranking(row["all"]["auroc"].get("difference_95"), row["all"]["accuracy"].get("difference_95"))
            for of, row in result.items()
        }
        for name, result in results.items()
        if name != BASELINE
    }
    return {"conditions": results, "verdicts": verdicts}


def attention(checkpoint: Path, count: int, seed: int, threads: int = 1) -> dict[str, Any]:
    """Return where rows look: at the system prompt, its first token, the picture, and the cell that is asked about.

    Descriptions are the true ones, so that every model's rows are about the same words; cells are those of questions about a
    colour. The layer of the focus is chosen on one half of the questions and read on the other.
    """
    model = PlainModel(checkpoint, threads)
    model.model.set_attn_implementation("eager")
    rng = random.Random(f"smol attention {seed}")
    shares: dict[str, list[list[float]]] = {"first token": [], "system": [], "picture": []}
    fair: dict[str, list[float]] = {name: [] for name in shares}
    slopes, focus = [], []
    for _ in range(count):
        scene = random_scene(rng, rng.choice((2, 3)), held_out=True)
        picture = render(scene, SIZE)
        weights, columns, rows = _rows(model, picture, "Describe the picture.", describe(scene))
        for name, own in columns.items():
            by_layer = weights[:, rows][:, :, own].sum(-1)  # (layers, answer rows)
            shares[name].append(by_layer.mean(1).tolist())
            fair[name].append(float(np.mean([len(own) / (row + 1) for row in rows])))
            if name == "picture":
                slopes.append(float(np.polyfit(range(len(rows)), by_layer.mean(0).numpy(), 1)[0]))
        scene_question = open_question(rng, scene, "color")
        if scene_question is None or scene_question.cell is None:
            continue
        ((question, answer),) = scene_question.turns
        weights, columns, rows = _rows(model, picture, question, answer)
        image = weights[:, rows[0]][:, columns["picture"]]  # (layers, cells), of the row that decides the first word
        focus.append((image[:, scene_question.cell] / image.sum(-1)).tolist())
    return _summary(shares, fair, slopes, np.array(focus))


def _rows(
    model: PlainModel, picture: Any, question: str, answer: str
) -> tuple[torch.Tensor, dict[str, list[int]], list[int]]:
    """Return attention (layers, rows, columns), mean over heads, the columns of each span, and the rows that answer."""
    content = [{"type": "image", "image": picture}, {"type": "text", "text": question}]
    prompt = DemoPrompt([picture], [{"role": "user", "content": content}])
    inputs = model.inputs([prompt], "right", [answer])
    with torch.no_grad():
        weights = torch.stack([layer[0].mean(0) for layer in model.model(**inputs, output_attentions=True).attentions])
    ids = inputs["input_ids"][0].tolist()
    image_id = model.tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
    image = [column for column, token in enumerate(ids) if token == image_id]
    turn = model.tokenizer.convert_tokens_to_ids("<|im_start|>")
    user = [column for column, token in enumerate(ids) if token == turn][1]
    start = len(model.tokenizer(model.text(prompt), add_special_tokens=False)["input_ids"]) - 1
    return (
        weights,
        {"first token": [0], "system": list(range(user)), "picture": image},
        list(range(start, len(ids) - 1)),
    )


def _summary(
    shares: dict[str, list[list[float]]], fair: dict[str, list[float]], slopes: Sequence[float], focus: np.ndarray
) -> dict[str, Any]:
    out: dict[str, Any] = {"samples": len(slopes), "spans": {}}
    for name, samples in shares.items():
        thirds = np.array_split(np.array(samples), criteria.ATTENTION_THIRDS, axis=1)  # (samples, layers of a third)
        expected = float(np.mean(fair[name]))
        rows = []
        for third in thirds:
            values = third.mean(1)
            bounds = interval(values)
            rows.append({"value": float(values.mean()), "value_95": bounds, "sink": criteria.is_sink(bounds, expected)})
        out["spans"][name] = {"fair": expected, "thirds": rows}
    slope = interval(np.array(slopes))
    out["picture along the answer"] = {
        "slope": float(np.mean(slopes)), "slope_95": slope, "decays": criteria.decays(slope),
    }  # fmt: skip
    half = len(focus) // 2
    if half > 1:
        layer = int(focus[:half].mean(0).argmax())
        bounds = interval(focus[half:, layer])
        out["focus"] = {
            "layer": layer, "value": float(focus[half:, layer].mean()), "value_95": bounds, "chance": 1 / 9,
            "n": len(focus) - half, "focuses": criteria.focuses(bounds, 1 / 9),
        }  # fmt: skip
    return out
