"""A model, requests with every intervention and every readout, and what there is to compare of their answers."""

from __future__ import annotations

import json
import math
import tempfile
from base64 import b64decode
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import load, load_file, save_file

import steering
from steering import Diagnose, Generate, Grammar, Icd, Pai, Request, Sage, Sampling, See, Steer, Think, Until, Vcd
from steering.interventions.dola import Dola
from steering.interventions.look_at import LookAt
from steering.interventions.project_out import ProjectOut
from steering.interventions.published.agla import Agla
from steering.interventions.published.m3id import M3id
from steering.interventions.published.only import Only
from steering.interventions.published.opera import OperaSteering
from steering.interventions.published.vista import VistaSteering
from steering.model.alarm import Alarm
from steering.model.calibration import FILE, Calibration
from steering.model.checkpoint.folder import embedded
from steering.protocol import readout
from tests import families
from tests.families import registry
from tests.forked import forked

STEPS = 4
"""Tokens of an answer: behind a mask that is refreshed after three comes one more, which shows it."""
LAYERS = 5
"""The model's layers: more than the allowed waits of a step, so that one wait per layer is noticed."""


def small(folder: Path, family: str = "qwen2_vl") -> Path:
    """Return a folder with a model of few layers, a vector and a calibration for the requests.

    Pretended devices, and communication at each layer, take long.
    """
    kinds = registry.ALL[family].config["text_config"].get("layer_types")
    text = {"layer_types": [*kinds, *kinds][:LAYERS]} if kinds else None
    families.build(family, folder, layers=LAYERS, text=text)
    weights = load_file(folder / "model.safetensors")
    held = {
        name: weight.bfloat16().half().float() for name, weight in weights.items()
    }  # by each dtype, without rounding
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    mllm = steering.load(folder, device="cpu")
    drawn = torch.Generator().manual_seed(0)
    weights = (torch.ones(LAYERS) for _ in range(3))
    direction = torch.randn(LAYERS, mllm.hidden_size, generator=drawn)
    (folder / "vectors").mkdir()
    vector = steering.SteeringVector("modality-preference", direction, *weights, (1, 2), mllm.fingerprint)
    vector.save(folder / "vectors" / "modality-preference.safetensors")
    measured = Calibration(mllm.fingerprint).with_divergence(torch.rand(LAYERS, 200, generator=drawn), samples=1)
    alarm = Alarm.of(json.loads((embedded() / FILE).read_text())["alarm"])
    replace(measured, alarm=alarm).save(folder)
    return folder


def computed_apart(program: Callable[[Path], Any], model: Path) -> Any:
    """Return as JSON what one of the programs beside this file computes in a process that ends with it."""
    with tempfile.TemporaryDirectory() as folder:
        log, computed = Path(folder, "log"), Path(folder, "computed.json")
        with forked(lambda: computed.write_text(json.dumps(program(model), default=list)), log) as process:
            process.join()
        assert process.exitcode == 0, log.read_text()[-4000:]
        return json.loads(computed.read_text())


def picture(*colour: int) -> Image.Image:
    """Return a square of a colour with a bright corner."""
    image = Image.new("RGB", (84, 84), colour)
    image.paste((250, 240, 230), (8, 8, 40, 40))
    return image


def chat(*pictures: Image.Image, text: str = "What colour is the star?") -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": image} for image in pictures]
    context = {"type": "text", "text": "Text context: The star is blue.", "span": "context"}
    return [{"role": "user", "content": [*parts, context, {"type": "text", "text": text}]}]


def requests(mllm: steering.MLLM) -> dict[str, Request]:
    """Return by name every intervention alone and with readouts, contrasts, samplings and other readers of the model."""
    with_picture = chat(picture(200, 30, 40))
    two = chat(
        picture(200, 30, 40), picture(20, 60, 220), text="Which picture is red? Think of what is said above. " * 3
    )
    vector = steering.VectorStore(Path(str(mllm.path)) / "vectors").get("modality-preference")
    read = set(readout.REGISTRY) - {"heatmaps"}  # pictures, of the patches
    everything = Diagnose(include=read, causal=True, target_image=1, residual_rows="prompt")

    def ask(
        messages: list[dict[str, Any]], *interventions: Any, sampling: dict[str, Any] | None = None, **more: Any
    ) -> Request:
        chosen = Sampling(**{"max_tokens": STEPS, "ignore_eos": True, "logprobs": 5, "seed": 7} | (sampling or {}))
        return Request(messages, chosen, interventions=interventions, **more)

    return {
        "plain": ask(with_picture),
        "text only": ask(chat()),
        "two images, read": ask(two, diagnose=everything),
        "read beside its baseline": ask(with_picture, Steer.to(vector, "text"), diagnose=everything, baseline=True),
        "steered": ask(with_picture, Steer.to(vector, "vision")),
        "steered until": ask(
            two,
            Steer.to(vector, "vision", until=Until("attention_ratio", 0.5, band=0.0, range=(0.0, 1.0))),
            diagnose=["modality"],
            n=2,
        ),
        "see, transferred": ask(two, See(alpha=0.5), diagnose=True),
        "see, scaled": ask(with_picture, See(alpha=0.9, reading="scale", shallow=1)),
        "think": ask(with_picture, Think(gamma=0.5, quantile=0.3), divergence=True),
        "generate": ask(with_picture, Generate(refresh=2)),
        "all of sage": ask(two, Sage(generate=Generate(refresh=3)), Steer.to(vector, "text"), diagnose=everything),
        "vcd": ask(with_picture, Vcd()),
        "icd": ask(with_picture, Icd(), diagnose=True),
        "pai": ask(two, Pai()),
        "m3id": ask(two, M3id(threshold=1.0)),
        "agla": ask(with_picture, Agla(keep=0.5)),
        "vista": ask(two, VistaSteering(strength=0.2, directions=drawn_vectors(mllm), tokens="all")),
        "only": ask(two, Only(layer=2, gamma=0.4)),
        "opera": ask(with_picture, OperaSteering(scale=100.0, candidates=3, penalty=2.0)),
        "dola": ask(with_picture, Dola(premature=[0, 2, 4], normalise=True)),
        "looking": ask(two, LookAt(bias=4.0, image=2, heads=[0, 3]), diagnose=["patches"]),
        "projected out": ask(two, ProjectOut(vector=vector, layers=[0, 3]), diagnose=["residual"]),
        "told that it may refuse": ask(with_picture, steering.RefusalPrompt(place="system"), diagnose=["focus"]),
        "sampled": ask(with_picture, sampling={"temperature": 1.5, "top_p": 0.9, "repetition_penalty": 1.2}, n=2),
        "forced, with states": ask(
            with_picture, forced="The star is red.", states=True, diagnose=["decay", "alarm", "drift"]
        ),
        "states of the answers": ask(
            with_picture,
            Steer.to(vector, "text"),
            diagnose=Diagnose(["states"], states={"layers": [1, 3], "positions": "generated"}),
        ),
        "reply": ask(with_picture, reply="The star is red."),
        "grammar": ask(with_picture, grammar=Grammar.regex("[0-9]{3}"), sampling={"ignore_eos": False}),
    }


def drawn_vectors(mllm: steering.MLLM) -> torch.Tensor:
    """Return vectors (layers, d) in place of those that VISTA measures."""
    return torch.randn(mllm.num_layers, mllm.hidden_size, generator=torch.Generator().manual_seed(1))


def told(engine: steering.Engine, requests: dict[str, Request]) -> dict[str, Any]:
    """Return the results of an engine for all requests at once, as JSON."""
    return {name: said(result) for name, result in zip(requests, engine.generate(requests.values()), strict=True)}


def said(result: steering.Result) -> list[Any]:
    """Return the comparable parts of a result, as JSON."""
    return [
        None
        if answer is None
        else {
            "tokens": list(answer.token_ids),
            "logprobs": [[alternative.logprob for alternative in token.top] for token in answer.logprobs or ()],
            "applied": answer.applied,
            "diagnostics": answer.diagnostics,
            **{
                name: None if values is None else values.tolist()
                for name in ("states", "next_logprobs", "divergence", "answer_states", "reply_logprobs")
                for values in [getattr(answer, name)]
            },
        }
        for choice in result.choices
        for answer in (choice, choice.baseline)
    ]


def differences(first: Any, second: Any, place: str = "", tolerance: float = 1e-4) -> list[str]:
    """Return the places where two values differ: numbers by more than a tolerance, relative if above 1."""
    if place.endswith("/safetensors"):
        first, second = (
            {name: tensor.tolist() for name, tensor in load(b64decode(file)).items()} for file in (first, second)
        )
    if isinstance(first, float) and isinstance(second, float):
        if "/gains/" in place:  # a share of the vocabulary, of which many tokens lie next to the bound
            tolerance = 0.05
        near = math.isclose(first, second, rel_tol=tolerance, abs_tol=tolerance) or (
            math.isnan(first) and math.isnan(second)
        )
        return [] if near else [f"{place}: {first} and {second}"]
    if isinstance(first, dict) and isinstance(second, dict) and first.keys() == second.keys():
        return [
            difference
            for key in first
            for difference in differences(first[key], second[key], f"{place}/{key}", tolerance)
        ]
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        pairs = enumerate(zip(first, second, strict=True))
        return [difference for i, (a, b) in pairs for difference in differences(a, b, f"{place}/{i}", tolerance)]
    return [] if first == second else [f"{place}: {first!r} and {second!r}"]
