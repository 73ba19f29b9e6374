"""Requests about scenes of the embedded model's world, and the comparison of their answers with our own engine's."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np

import steering
from demo.world.conflicts import random_conflict
from demo.world.questions import ask
from demo.world.scenes import random_scene, render
from steering import Diagnose, Generate, Icd, Request, Sampling, Steer, SteeringVector, Think, Vcd
from tests.steering.parallel.asking import differences, said
from tests.steering.vllm.test_answers import without_gains

SIGMA = 1e-5
"""The most that an attention factor may differ by."""
TOLERANCE = 5e-4
"""The most that other numbers may differ by, relative if they are above 1."""
READ = ("focus", "modality", "decay", "anchor", "drift", "confidence")
CHOICES = ("all", "prompt", "generated", "image", "text", "image:1")


@cache
def conversation(seed: int, images: int = 1) -> tuple[dict[str, Any], ...]:
    """Return a question about pictures of scenes, the first of which the text contradicts."""
    rng = random.Random(f"vllm {seed}")
    scenes = [random_scene(rng, held_out=True) for _ in range(images)]
    conflict = random_conflict(rng, scenes[0])
    assert conflict is not None
    question = ask(rng, conflict.fact.kind, conflict.fact.key)
    pictures = [{"type": "image", "image": render(scene, (112, 112))} for scene in scenes]
    context = {"type": "text", "text": conflict.context(), "span": "context"}
    return ({"role": "user", "content": [*pictures, context, {"type": "text", "text": question}]},)


def request(seed: int, *interventions: Any, images: int = 1, tokens: int = 12, **more: Any) -> Request:
    sampling = Sampling(max_tokens=tokens, temperature=0.0, logprobs=2)
    return Request(list(conversation(seed, images)), sampling, list(interventions), **more)


def steered(vector: SteeringVector, count: int = 8) -> dict[str, Request]:
    """Return plain requests, the same steered both ways, and each choice of tokens, with one and two images."""
    asked = {}
    for seed in range(count):
        images = 1 + seed % 2
        for name, steers in {
            "plain": [],
            "text": [Steer.to(vector, "text")],
            "vision": [Steer.to(vector, "vision", 2.0)],
        }.items():
            asked[f"{name} {seed}"] = request(seed, *steers, images=images, diagnose=Diagnose(["focus"]))
    for place, choice in enumerate(CHOICES):
        steer = Steer(vector, 2.5, tokens=choice)
        asked[f"tokens {choice}"] = request(place, steer, images=2, diagnose=Diagnose(["focus", "modality"]))
    both = Steer(vector, 2.0, tokens="image:2"), Steer(vector, -1.0, layers=(1, 3), tokens="text")
    asked["two vectors"] = request(3, *both, images=2, diagnose=Diagnose(READ))
    return asked


def contrasted(vector: SteeringVector, count: int = 4) -> dict[str, Request]:
    """Return contrast pairs beside single answers, plain and steered."""
    asked = {}
    for seed in range(count):
        asked[f"icd {seed}"] = request(seed, Icd(), images=1 + seed % 2, diagnose=Diagnose(["focus"]))
        asked[f"vcd {seed}"] = request(seed, Vcd(), images=1 + seed % 2)
        asked[f"steered icd {seed}"] = request(seed, Icd(), Steer.to(vector, "text"))
        asked[f"single {seed}"] = request(seed, Steer.to(vector, "vision"), diagnose=Diagnose(["focus"]))
    # A prompt's log-probabilities have to wait where its answer waits for the other side: behind its mask for certain.
    for name, contrast in {"icd": Icd(), "generate": Generate()}.items():
        asked[f"scored {name}"] = request(0, contrast, reply="The ring is white.")
    return asked


def mixed(vector: SteeringVector, count: int, seed: int = 0) -> dict[str, Request]:
    """Return requests with interventions, images and readouts that are drawn."""
    rng, asked = random.Random(seed), {}
    for number in range(count):
        images = rng.choice((1, 1, 2))
        choices: list[list[Any]] = [
            [], [Steer.to(vector, rng.choice(("text", "vision")), rng.choice((0.5, 1.0, 2.0)))],
            [Steer(vector, rng.uniform(-3, 3), tokens=rng.choice(CHOICES))], [Icd()], [Vcd()],
            [Think(gamma=0.5, threshold=0.05)], [Generate(refresh=rng.choice((0, 4)))],
        ]  # fmt: skip
        interventions = rng.choices(choices, (3, 3, 3, 1, 1, 1, 1))[0]
        read = Diagnose(list(rng.sample(READ, rng.randint(1, 3)))) if rng.random() < 0.5 else None
        scene, tokens = rng.randrange(12), rng.randint(1, 20)
        asked[f"{number}"] = request(scene, *interventions, images=images, tokens=tokens, diagnose=read)
    return asked


def faults(found: Mapping[str, steering.Result], expected: Mapping[str, steering.Result]) -> Iterator[str]:
    """Yield what differs between two engines' results of the same requests."""
    for name, result in found.items():
        other = expected[name]
        for one, two in zip(result.choices, other.choices, strict=True):
            if one.token_ids != two.token_ids:
                yield f"{name}: {one.text!r} instead of {two.text!r}"
            elif one.diagnostics and one.diagnostics.get("focus"):
                sigmas = [np.array(choice.diagnostics["focus"]["sigma"], float) for choice in (one, two)]
                gap = float(np.abs(sigmas[0] - sigmas[1]).max(initial=0.0))
                if not gap <= SIGMA:
                    yield f"{name}: sigma differs by {gap}"
        yield from differences(*([said_by_vllm(answer) for answer in (result, other)]), name, TOLERANCE)


def said_by_vllm(result: steering.Result) -> list[Any]:
    """Return the comparable parts of a result without what vLLM servers do not return.

    These are the distribution behind a prompt's states, and the shares of tokens that gain under Generate.
    """
    answers = [None if answer is None else answer | {"next_logprobs": None} for answer in said(result)]
    return without_gains(answers)
