"""The answers of plain transformers that vLLM servers are compared with at the start, computed in a process that ends.

That process reads its task as JSON from standard input and writes a `Reference` to the file that is named. It is the only
moment at which the front's machine needs the memory of a model.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from steering.child.facts import ModelFacts
from steering.child.link import KINDS
from steering.errors import UnsupportedModel, VectorError
from steering.files import write_atomically
from steering.front.engine import Engine
from steering.front.magnitudes import magnitudes
from steering.messages import serialization
from steering.model.loading import load
from steering.model.mllm import MLLM
from steering.model.processing.pixels import picture
from steering.prompt.layout import Prompt, build_prompt
from steering.runner.selfcheck import plain
from steering.vectors.vector import SteeringVector

STEPS = 8
"""Most tokens of each reference answer."""
QUESTIONS = ("What is this?", "Describe the picture in a few words, then say what is missing.", "Is the sea red? Why?")
STRENGTHS = (0.0, 1.0, -1.0)
"""Strengths of the vector, 0 for none."""


@dataclass(frozen=True)
class ReferenceTask:
    """The model of the references, by arguments of `load`, and the paths of steering vectors, of which one is used."""

    model: str
    dtype: str = "auto"
    local_files_only: bool = True
    chat_template: str | None = None
    calibrations: str | None = None
    vectors: tuple[str, ...] = ()


@dataclass(frozen=True)
class ReferenceAnswer:
    """Plain transformers' answer to one of the `QUESTIONS`, under the vector at a strength.

    tokens: greedy ones. margins: for each, by how much its log-probability exceeds that of the next likeliest one, in nats.
    states: (layers, d), the residual stream after each layer at the prompt's last token, what the vector adds included.
    """

    question: int
    strength: float
    tokens: tuple[int, ...]
    margins: tuple[float, ...]
    states: torch.Tensor


@dataclass(frozen=True)
class Reference:
    """The facts of a model, plain transformers' answers, and the path of the vector that some are steered with.

    It is the first one that was made for the model; None where there is none.
    """

    facts: ModelFacts
    answers: tuple[ReferenceAnswer, ...]
    vector: str | None = None


REFERENCE_KINDS = (*KINDS, Reference, ReferenceAnswer)


def chat_of(question: int) -> list[dict[str, Any]]:
    """Return the chat of a question: with a picture, but for the last one."""
    text = {"type": "text", "text": QUESTIONS[question]}
    images = [{"type": "image", "image": picture()}] if question < len(QUESTIONS) - 1 else []
    return [{"role": "user", "content": [*images, text]}]


def questions_of(mllm: MLLM) -> list[int]:
    """Return the numbers of the questions that a model can read."""
    return [number for number in range(len(QUESTIONS)) if number < len(QUESTIONS) - 1 or not mllm.needs_images]


@contextmanager
def _steered(layers: nn.ModuleList, delta: torch.Tensor | None) -> Iterator[list[torch.Tensor]]:
    """Add delta (layers, d) to every token's state after each layer, and yield the states at each pass's last token."""
    states: list[torch.Tensor] = []

    def hook(layer: int) -> Any:
        def after(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            out = output if delta is None else output + delta[layer].to(output)
            states.append(out[0, -1].float())
            return out

        return after

    with ExitStack() as stack:
        for number, layer in enumerate(layers):
            stack.callback(layer.register_forward_hook(hook(number)).remove)
        yield states


@torch.inference_mode()
def reference_answer(
    mllm: MLLM, prompt: Prompt, question: int, strength: float, vector: SteeringVector | None
) -> ReferenceAnswer:
    """Return plain transformers' greedy answer to a prompt, on eager attention."""
    delta = None if vector is None or not strength else vector.delta(strength)
    with plain(mllm), _steered(mllm.layers, delta) as states:
        out = mllm.model.generate(
            **{name: value.to(mllm.device) for name, value in prompt.inputs.items()},
            max_new_tokens=STEPS,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    tokens = out.sequences[0, prompt.length :].tolist()
    logprobs = torch.cat(out.logits).float().log_softmax(-1)
    chosen = logprobs.gather(1, torch.tensor(tokens, device=logprobs.device)[:, None])
    others = logprobs.scatter(1, torch.tensor(tokens, device=logprobs.device)[:, None], -torch.inf).amax(-1)
    margins = (chosen[:, 0] - others).tolist()
    return ReferenceAnswer(question, strength, tuple(tokens), tuple(margins), torch.stack(states[: len(mllm.layers)]))


def compute(task: ReferenceTask) -> Reference:
    """Return the references of a model; raises what loading and the self-check raise."""
    mllm = load(
        task.model,
        dtype=task.dtype,
        device="cpu",
        local_files_only=task.local_files_only,
        chat_template=task.chat_template,
        calibrations=task.calibrations,
    )
    file, vector = _vector_for(mllm, task.vectors)
    answers = []
    for question in questions_of(mllm):
        prompt = build_prompt(mllm, chat_of(question))
        for strength in STRENGTHS if vector is not None else STRENGTHS[:1]:
            answers.append(reference_answer(mllm, prompt, question, strength, vector))
    engine = Engine(mllm, slots=2, max_length=min(mllm.context_length, 1024))
    return Reference(ModelFacts.of(engine, magnitudes(engine)), tuple(answers), file)


def _vector_for(mllm: MLLM, files: Sequence[str]) -> tuple[str | None, SteeringVector | None]:
    """Return the first of several vectors that was made for a model, with its path."""
    for file in files:
        with suppress(VectorError, OSError):
            vector = SteeringVector.load(Path(file))
            if vector.fingerprint == mllm.fingerprint and vector.direction.shape == (mllm.num_layers, mllm.hidden_size):
                return file, vector
    return None, None


def computed_apart(task: ReferenceTask, file: Path, environment: Mapping[str, str] = os.environ) -> Reference:
    """Return the references that a process of its own computes into a file, or has computed before.

    Raises UnsupportedModel with the last line that it wrote, where it fails.
    """
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-P", "-c", f"from {__name__} import main; main()", str(file)]
        process = subprocess.run(
            command, input=json.dumps(asdict(task)), capture_output=True, text=True, check=False, env=dict(environment)
        )
        if process.returncode:
            reason = process.stderr.strip().rpartition("\n")[2]
            raise UnsupportedModel(f"The plain model's answers could not be computed: {reason}")
    reference: Reference = serialization.read(file.read_bytes(), REFERENCE_KINDS)
    return reference


def main() -> None:
    """Compute the references of the task on standard input into the file that the command line names."""
    reference = compute(ReferenceTask(**json.loads(sys.stdin.read())))
    write_atomically(sys.argv[1], serialization.written(reference, REFERENCE_KINDS))
