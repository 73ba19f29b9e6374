"""Compare vLLM with the plugin to plain transformers on this machine: `python vllm/check_gpu.py MODEL`.

It runs in vLLM's environment, and needs nothing of Helmsight but the plugin. MODEL is a folder with a model for
pictures, small enough to be loaded twice in float32. Plain, steered and contrasted greedy answers, many at once, must
have the tokens of transformers, and states after each layer must agree; first uncompiled, then as vLLM compiles by
default. Where the server reads attention (with `HELMSIGHT_ATTENTION=torch` in the environment on a GPU), the shares that
rows give to the picture and to the rest of the prompt must be those of eager attention, on a GPU in bfloat16 too, which
other backends take than float32. The last line says whether all did.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from transformers import AutoModelForImageTextToText, AutoProcessor

STEPS, NAME = 12, "check"
TOLERANCE = 2e-3
"""Most that a layer's state may differ by, relative to its norm; kernels of GPUs sum in other orders."""
SHARES = {"float32": 5e-3, "bfloat16": 2e-2}
"""Most that a share of a layer's attention may differ by, mean over rows."""
ROWS = 4
"""The number of the prompt's last rows whose attention is compared, beside that of generated tokens."""
MARGIN = 1e-2
"""Nats between the likeliest tokens below which rounding may choose either; nothing is compared from there on."""
QUESTIONS = ("What is in the picture?", "Name a colour, then an animal.", "Is the sea green? Why?", "Count to five.")
with socket.socket() as _free:
    _free.bind(("127.0.0.1", 0))
    PORT = _free.getsockname()[1]  # no other server's, which would answer in its place
ASKED = os.environ.get("HELMSIGHT_ATTENTION") == "torch"
MODES = {"uncompiled": ["--enforce-eager"], "compiled": []}


class Reference:
    """Plain transformers, with a vector that is added after each layer."""

    def __init__(self, model: Path, device: str):
        self.processor = AutoProcessor.from_pretrained(model)
        eager = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
        self.model = eager.to(device).eval()
        text = self.model.config.get_text_config()
        lists = [module for name, module in self.model.named_modules() if name.endswith("layers") and "vis" not in name]
        self.layers = next(module for module in lists if len(module) == text.num_hidden_layers)
        drawn = torch.randn(len(self.layers), text.hidden_size, generator=torch.Generator().manual_seed(0))
        self.direction = drawn / drawn.norm(dim=-1, keepdim=True)

    def prompt(self, question: str, picture: Image.Image | None) -> tuple[dict[str, Any], list[int]]:
        """Return the inputs of a prompt, and its ids with each picture as one token."""
        content = [*([{"type": "image"}] if picture else []), {"type": "text", "text": question}]
        text = self.processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        pictures = [picture] if picture else None
        inputs = self.processor(text=[text], images=pictures, return_tensors="pt", add_special_tokens=False)
        return dict(inputs), self.processor.tokenizer(text, add_special_tokens=False).input_ids

    @torch.inference_mode()
    def answer(
        self, inputs: dict[str, Any], scale: float, other: dict[str, Any] | None = None, weight: float = 1.0
    ) -> tuple[list[int], list[float], torch.Tensor, dict[str, torch.Tensor]]:
        """Return greedy tokens, their margins, the states of the prompt's last token, and shares of attention.

        other: a contrast's prompt.
        """
        tokens, margins, states = list[int](), list[float](), None
        for _ in range(STEPS):
            logits, seen = self._logits(inputs, tokens, scale)
            states = seen if states is None else states
            if other is not None:
                logits = logits + weight * (logits - self._logits(other, tokens, scale)[0])
            top = logits.log_softmax(-1).topk(2).values
            margins.append(float(top[0] - top[1]))
            tokens.append(int(logits.argmax()))
        return tokens, margins, states, self._shares(inputs, tokens, scale)

    def labels(self, inputs: dict[str, Any]) -> torch.Tensor:
        """Return 0 for a prompt's tokens of pictures, and 1 for others."""
        return (inputs["input_ids"][0] != self.model.config.image_token_id).long()

    def _shares(self, inputs: dict[str, Any], tokens: list[int], scale: float) -> dict[str, torch.Tensor]:
        """Return the attention that rows of a group give to each label, (layers, labels), means over heads and rows."""
        labels, length = torch.nn.functional.one_hot(self.labels(inputs), 2).float(), inputs["input_ids"].shape[1]
        seen = self._forward(inputs, tokens[:-1], scale, output_attentions=True)[0].attentions
        by_label = torch.stack([layer[0].float().mean(0).cpu()[:, :length] @ labels for layer in seen])
        return {"question": by_label[:, length - ROWS : length].mean(1), "generated": by_label[:, length:].mean(1)}

    def _logits(self, inputs: dict[str, Any], tokens: list[int], scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        out, states = self._forward(inputs, tokens, scale)
        return out.logits[0, -1].float().cpu(), states

    def _forward(
        self, inputs: dict[str, Any], tokens: list[int], scale: float, **more: Any
    ) -> tuple[Any, torch.Tensor]:
        """Return the model's output, and the states of the prompt's last token."""
        device, seen = self.model.device, list[torch.Tensor]()
        length = inputs["input_ids"].shape[1]

        def hook(number: int) -> Any:
            def after(module: Any, args: Any, output: Any) -> Any:
                hidden = output[0] if isinstance(output, tuple) else output
                hidden = hidden + scale * self.direction[number].to(hidden)
                seen.append(hidden[0, length - 1].float().cpu())
                return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

            return after

        ids = torch.cat([inputs["input_ids"], torch.tensor([tokens], dtype=torch.long)], 1).to(device)
        rest = {name: value.to(device) for name, value in inputs.items() if name not in ("input_ids", "attention_mask")}
        if "mm_token_type_ids" in rest:
            rest["mm_token_type_ids"] = torch.nn.functional.pad(rest["mm_token_type_ids"], (0, len(tokens)))
        with ExitStack() as stack:
            for number, layer in enumerate(self.layers):
                stack.callback(layer.register_forward_hook(hook(number)).remove)
            out = self.model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **rest, **more)
        return out, torch.stack(seen)


def save_vector(direction: torch.Tensor, folder: Path) -> str:
    """Write the vector's file as Helmsight does, and return its digest."""
    ones = torch.ones(len(direction))
    tensors = {"direction": direction.contiguous(), "weight": ones, "mean_abs": ones.clone(), "std": ones.clone()}
    hasher = hashlib.sha256()
    for name in ("direction", "weight", "mean_abs", "std"):
        hasher.update(tensors[name].numpy().tobytes())
    save_file(tensors, folder / f"{NAME}.safetensors", metadata={"sha256": hasher.hexdigest()})
    return hasher.hexdigest()


@contextmanager
def served(model: Path, vectors: Path, flags: list[str]) -> Any:
    """Serve the model with the plugin on this machine until the block ends."""
    environment = os.environ | {"VLLM_PLUGINS": "helmsight", "HELMSIGHT_VECTORS": str(vectors), "HF_HUB_OFFLINE": "1"}
    command = [
        sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--host", "127.0.0.1", "--port", str(PORT),
        "--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "32", "--gpu-memory-utilization", "0.5", *flags,
    ]  # fmt: skip
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        while True:
            assert process.poll() is None, "vLLM ended"
            try:
                facts = get("/v1/helmsight/facts")
                break
            except OSError:
                time.sleep(1)
        yield facts
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def get(path: str) -> Any:
    """Return the JSON at a path of the server."""
    with urllib.request.urlopen(f"http://127.0.0.1:{PORT}{path}", timeout=10) as response:
        return json.load(response)


def ask(body: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
    """Return the tokens and the measurements of an answer."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}/v1/helmsight/answer", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=300) as response:
            lines = [json.loads(line) for line in response]
    except urllib.error.HTTPError as error:
        raise SystemExit(f"vLLM refuses a body: {error.read().decode()}") from error
    if "ended" not in lines[-1]:
        raise SystemExit(f"an answer failed: {lines[-1]}")
    return [token for line in lines[:-1] for token in line["tokens"]], lines[-1]["ended"]["taken"]


def prompt_body(inputs: dict[str, Any], ids: list[int]) -> dict[str, Any]:
    """Return a prompt as the contract has it."""
    expanded = inputs["input_ids"][0].numpy().astype("<i4")
    digest = hashlib.sha256(expanded.tobytes()).hexdigest()
    return {"ids": ids, "length": len(expanded), "sha256": digest, "classes": [[0, len(expanded)]]}


def bodies(reference: Reference, digest: str, pictures: bool) -> dict[str, tuple[dict[str, Any], Any]]:
    """Return by name the bodies of answers, with what plain transformers says."""
    picture = Image.effect_mandelbrot((112, 112), (-2, -1.5, 1, 1.5), 60).convert("RGB") if pictures else None
    encoded = io.BytesIO()
    if picture is not None:
        picture.save(encoded, "PNG")
    images = [base64.b64encode(encoded.getvalue()).decode()] if pictures else []
    norm = float(reference.answer(reference.prompt(QUESTIONS[0], picture)[0], 0.0)[2].norm(dim=-1).median())
    every, layers = {}, list(range(len(reference.layers)))
    for question in QUESTIONS:
        inputs, ids = reference.prompt(question, picture)
        sampling, length = {"max_tokens": STEPS, "ignore_eos": True}, inputs["input_ids"].shape[1]
        labels = [[label, 1] for label in reference.labels(inputs).tolist()]
        plain = {
            "prompt": prompt_body(inputs, ids),
            "images": images,
            "sampling": sampling,
            "seed": 0,
            "state_position": -1,
            "attention": {"labels": labels, "rows": {"question": [[length - ROWS, length]]}},
        }
        for scale in (0.0, 0.1 * norm, -0.1 * norm):
            vector = {
                "name": NAME,
                "digest": digest,
                "scale": scale,
                "layers": layers,
                "classes": [0],
                "generated": True,
            }
            body = plain | ({"steering": {"classes": 1, "vectors": [vector]}} if scale else {})
            every[f"{question} {scale:.2f}"] = body, reference.answer(inputs, scale)
        other, other_ids = reference.prompt(f"Answer wrongly. {question}", picture)
        twin = {"rule": {"weight": 1.0}, "prompt": prompt_body(other, other_ids)}
        every[f"{question} contrasted"] = plain | {"twin": twin}, reference.answer(inputs, 0.0, other)
    return every


def faults(name: str, tokens: list[int], taken: dict[str, Any], expected: Any, dtype: str) -> list[str]:
    """Return what an answer has otherwise than plain transformers; of one in bfloat16, attention alone is compared."""
    right, margins, states, shares = expected
    wrong = list[str]()
    if "attention" in taken:
        # Generated tokens are rows of both only where they are the same.
        for group in ("question", "generated") if tokens == right else ("question",):
            rows = ROWS if group == "question" else STEPS - 1
            gaps = (numbers(taken["attention"][group]) / rows - shares[group]).abs().amax(1)
            if gaps.max() > SHARES[dtype]:
                wrong.append(f"{name}: attention of layer {int(gaps.argmax())} differs by {gaps.max():.4f} ({group})")
    if dtype != "float32":
        return wrong
    gaps = (numbers(taken["states"]) - states).norm(dim=-1) / states.norm(dim=-1)
    if gaps.max() > TOLERANCE:
        wrong.append(f"{name}: the state after layer {int(gaps.gt(TOLERANCE).nonzero()[0])} differs")
    for place, (one, two, margin) in enumerate(zip(tokens, right, margins, strict=True)):
        if margin < MARGIN:
            break
        if one != two:
            return [*wrong, f"{name}: token {place + 1} is {one} instead of {two}"]
    return wrong


def numbers(array: dict[str, Any]) -> torch.Tensor:
    """Return an array of an answer's measurements."""
    return torch.from_numpy(np.frombuffer(base64.b64decode(array["data"]), "<f4").copy()).view(array["shape"])


def check(model: Path, device: str, pictures: bool) -> list[str]:
    """Return the faults of all modes."""
    reference, wrong = Reference(model, device), list[str]()
    with tempfile.TemporaryDirectory() as vectors:
        every = bodies(reference, save_vector(reference.direction, Path(vectors)), pictures)
        del reference.model
        modes = MODES | ({"bfloat16": ["--enforce-eager", "--dtype", "bfloat16"]} if device != "cpu" and ASKED else {})
        for mode, flags in modes.items():
            dtype = "bfloat16" if mode == "bfloat16" else "float32"
            limit = ["--limit-mm-per-prompt", '{"image": 1, "video": 0}']
            with served(model, Path(vectors), [*flags, *limit]) as facts, ThreadPoolExecutor(16) as threads:
                print(mode, "serves", facts["vllm"], "on", facts["device"], "and can", *facts["can"])
                began = time.monotonic()
                names = [*every] * (4 if dtype == "float32" else 1)
                unread = () if "attention" in facts["can"] else ("attention",)
                asked = {name: {key: value for key, value in body.items() if key not in unread}
                         for name, (body, _) in every.items()}  # fmt: skip
                answers = list(threads.map(lambda name, asked=asked: ask(asked[name]), names))
                steps = get("/v1/helmsight/steps")
                print(mode, f"{len(names)} answers in {time.monotonic() - began:.1f} s;", steps)
                found = [fault for name, (tokens, taken) in zip(names, answers, strict=True)
                         for fault in faults(name, tokens, taken, every[name][1], dtype)]  # fmt: skip
                if ASKED and (unread or not steps["paged_layers"]):
                    found.append("attention was not read from paged keys")
                if steps["steered"] == 0:
                    found.append("no step was steered")
                wrong += [f"{mode}: {fault}" for fault in found]
    return wrong


def main() -> None:
    """Run the check of the command line, and end with 1 where something differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text-only", action="store_true", help="ask without a picture")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    wrong = check(options.model.absolute(), device, not options.text_only)
    print("\n".join(wrong) or "all answers are those of plain transformers")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
