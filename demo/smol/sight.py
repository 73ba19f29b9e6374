"""Yes/no questions about noisy pictures whose wrong answers are habits, and the attention behind answers of `smol`."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from demo.evaluation.answering import DemoPrompt, PlainModel
from demo.model.tokenizer import IMAGE_TOKEN
from demo.smol import criteria
from demo.smol.things import THINGS, contradicting_scene, render_things, thing_scene
from demo.world.faithfulness import SIZE, existence_samples, noise_source, noised
from demo.world.questions import article, describe, open_question
from demo.world.scenes import COLOURS, random_scene, render
from demo.world.wordings import EXISTS
from probes.answering.base import Answerer, Question
from probes.answering.replies import replies
from probes.harness.bootstrap import interval
from probes.harness.comparison import BASELINE, PartAnswered, Way, ask_all, compare, measured
from probes.harness.pictures import chat
from probes.image_qa.yes_no import YesNo, part
from steering import Generate, Icd, Pai, See, Think, Vcd


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


def known_colours(answerer: Answerer, quiet: bool = False) -> dict[str, str]:
    """Return the colour that the model names where it is asked for a thing's usual one, without a picture, by thing."""
    chats = [[{"role": "user", "content": f"What color is {article(kind)} usually?"}] for kind in THINGS]
    stream = replies(
        answerer, (Question(chat, diagnose=None) for chat in chats), ["usual"] * len(chats), title="Usual", quiet=quiet
    )
    named = {}
    for kind, reply in zip(THINGS, stream, strict=True):
        places = {colour: reply.text.lower().find(colour) for colour in COLOURS}
        named[kind] = min((colour for colour in COLOURS if places[colour] >= 0), key=places.__getitem__, default="")
    return named


def rightly_named(named: Mapping[str, str]) -> list[str]:
    """Return the things of `known_colours` whose usual colour the model names."""
    return [kind for kind, colour in named.items() if colour == THINGS[kind]]


def expectations(answerer: Answerer, quiet: bool = False) -> dict[str, float]:
    """Return the log-odds of yes to whether a thing is in a grey picture, by thing, mean over the wordings."""
    grey = Image.new("RGB", SIZE, (127, 127, 127))
    asked = [(kind, words.format(thing=article(kind))) for kind in THINGS for words in EXISTS]
    questions = (Question(chat([grey], text), max_tokens=1, diagnose=None, odds=True) for _, text in asked)
    stream = list(replies(answerer, questions, ["expected"] * len(asked), title="Expected", quiet=quiet))
    odds: dict[str, list[float]] = {kind: [] for kind in THINGS}
    for (kind, _), reply in zip(asked, stream, strict=True):
        if reply.odds is not None:
            odds[kind].append(reply.odds)
    return {kind: float(np.mean(values)) for kind, values in odds.items() if values}


def absent(count: int, seed: int, expected: Mapping[str, float], noise: float = 0.0) -> list[YesNo]:
    """Return `count` questions about the existence of things; half have the answer yes.

    Of four about a picture, one is about the absent thing that the model expects most by `expected` ("usual"), one about
    the absent one that it expects least ("unusual"), and two about a thing that is there.
    """
    rng, noise_rng = random.Random(f"smol absent {seed}"), noise_source(seed)
    samples: list[YesNo] = []
    while len(samples) < count:
        scene = thing_scene(rng, rng.choice((2, 3)), held_out=True)
        present = [thing.kind for thing in scene.shapes]
        missing = sorted((kind for kind in expected if kind not in present), key=expected.__getitem__)
        image = noised(render_things(scene, SIZE, rng), noise, noise_rng)
        words, there = rng.choice(EXISTS), rng.choice(present)
        samples += _four(image, *(words.format(thing=article(kind)) for kind in (missing[-1], there, missing[0])))
    return samples[:count]


def recoloured(count: int, seed: int, known: Collection[str] = tuple(THINGS), noise: float = 0.0) -> list[YesNo]:
    """Return `count` questions about the colour of a thing that does not have its usual one; half have the answer yes.

    Of four about a picture, one asks for the usual colour ("usual"), one for another wrong one ("unusual"), and two for the
    thing's own.
    """
    rng, noise_rng = random.Random(f"smol recoloured {seed}"), noise_source(seed)
    samples: list[YesNo] = []
    while len(samples) < count:
        scene, thing = contradicting_scene(rng, known)
        usual, own = THINGS[thing.kind], thing.colour
        unusual = rng.choice([colour for colour in COLOURS if colour not in (usual, own)])
        image = noised(render_things(scene, SIZE, rng), noise, noise_rng)
        samples += _four(image, *(f"Is the {thing.kind} {colour}?" for colour in (usual, own, unusual)))
    return samples[:count]


def _four(image: Image.Image, usual: str, right: str, unusual: str) -> list[YesNo]:
    """Return the questions about a picture, in the order in which `habit` takes them."""
    pairs = (usual, "usual"), (right, "usual"), (unusual, "unusual"), (right, "unusual")
    return [YesNo(image, text, text == right, setting) for text, setting in pairs]


def ranked(answerer: Answerer, count: int, seed: int, quiet: bool = False) -> dict[str, Any]:
    """Return by condition and part accuracy, AUROC and best-threshold accuracy, with verdicts on differences, and habits.

    "recoloured" is about things whose usual colour the model names itself; without any it is left out.
    """
    named, expected = known_colours(answerer, quiet), expectations(answerer, quiet)
    known = rightly_named(named)
    makers: dict[str, Callable[[int, int, float], list[YesNo]]] = {
        "existence": lambda count, seed, noise: existence_samples(count, seed, noise=noise),
        "absent": lambda count, seed, noise: absent(count, seed, expected, noise),
    }
    if known:
        makers["recoloured"] = lambda count, seed, noise: recoloured(count, seed, known, noise)
    noises = {name: chosen_noise(answerer, make, count, seed, quiet) for name, make in makers.items()}
    parts = [part(name, make(count, seed, noises[name]["noise"])) for name, make in makers.items()]
    answers = ask_all(answerer, conditions(), parts, max_tokens=1, quiet=quiet)
    results = measured(answers)
    verdicts = {
        name: {
            of: criteria.ranking(*(_difference(row["all"][metric]) for metric in ("auroc", "accuracy")))
            for of, row in result.items()
        }
        for name, result in results.items()
        if name != BASELINE
    }
    habits = {
        name: {one.part.name: habit(one) for one in answered if one.part.name != "existence"}
        for name, answered in answers.items()
    }
    return {
        "named": named, "expected": expected, "noise": noises, "conditions": results, "verdicts": verdicts,
        "habits": habits,
    }  # fmt: skip


def _difference(score: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return the interval of a difference to the plain answers, without a width where no resample differs."""
    bounds, difference = score.get("difference_95"), score.get("difference")
    return bounds if bounds is not None or difference is None else (difference, difference)


def chosen_noise(
    answerer: Answerer, make: Callable[[int, int, float], list[YesNo]], count: int, seed: int, quiet: bool
) -> dict[str, Any]:
    """Return the noise at which plain AUROC is nearest to the criteria's, and the AUROC at each, on another seed."""
    tried = [part(f"{noise:g}", make(round(criteria.TUNING * count), seed + 1000, noise)) for noise in criteria.NOISES]
    plain = compare(answerer, {BASELINE: ()}, tried, max_tokens=1, quiet=quiet)[BASELINE]
    aurocs = {noise: plain[f"{noise:g}"]["all"]["auroc"]["value"] for noise in criteria.NOISES}
    best = min(aurocs, key=lambda noise: abs((aurocs[noise] or 0) - criteria.AUROC))
    return {"noise": best, "auroc": {f"{noise:g}": value for noise, value in aurocs.items()}}


def habit(answered: PartAnswered[YesNo]) -> dict[str, Any]:
    """Return how much greater the log-odds of yes to what is usual are than to another wrong question, with the verdict.

    answered: "absent" or "recoloured". A picture counts if both questions have log-odds.
    """
    odds = [reply.odds for (reply,) in answered.replies]
    differences = np.array([
        usual - unusual for usual, unusual in zip(odds[::4], odds[2::4], strict=False)
        if usual is not None and unusual is not None
    ])  # fmt: skip
    if not len(differences):
        return {"value": None, "n": 0}
    bounds = interval(differences)
    return {
        "value": float(differences.mean()), "value_95": bounds, "n": len(differences), "habit": criteria.is_habit(bounds),
    }  # fmt: skip


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
