"""Answers to the bodies of the contract by plain transformers alone: each step computes the whole sequence, without a cache.

It shares no code with the engine but formulas that are tested elsewhere, so that its answers judge both it and the client.
"""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors import safe_open
from transformers import AutoModelForImageTextToText

import steering
from steering.grammar.compiled import Grammars
from steering.grammar.grammar import Grammar
from steering.grammar.masks import Masks
from steering.interventions.contrast import diffusion
from steering.interventions.generate import chosen_patches, masked_pixels
from steering.measures import activation_maps, divergence
from steering.prompt.layout import ImageSpan
from steering.vllm.arrays import array_of


class WrongBody(Exception):
    """A body cannot be answered; `param` names the field in it."""

    def __init__(self, message: str, param: str):
        super().__init__(message)
        self.param = param


@dataclass
class Prompt:
    """A prompt as the model takes it.

    classes: (n,) of each token, for steering. images: the columns of each. forced: ids behind it that count as
    generated.
    """

    ids: list[int]
    tensors: dict[str, torch.Tensor]
    classes: list[int]
    images: list[torch.Tensor]
    forced: list[int] = field(default_factory=list)


@dataclass
class Passed:
    """One pass over a sequence of n tokens.

    logits: (n, vocabulary). attention: (layers, n, n), mean over heads. states: (layers, n, d), after steering. inverse:
    (layers, n), 1 / |h| before it. thought: (layers, n, 2), whether an update was damped, and D. final: (n, d), normalised.
    """

    logits: torch.Tensor
    attention: torch.Tensor
    states: torch.Tensor
    inverse: torch.Tensor
    thought: torch.Tensor
    final: torch.Tensor


@dataclass
class Spanned:
    """The additions and dampings of an answer.

    Deltas by class (layers, classes, d) and for generated tokens (layers, d), and Think's options.
    """

    delta: torch.Tensor | None = None
    generated: torch.Tensor | None = None
    think: dict[str, Any] | None = None
    inputs: list[torch.Tensor] = field(default_factory=list)


class PlainAnswers:
    """Answers bodies one at a time. mllm: the same model in the engine, for its processor and the matchers of grammars."""

    def __init__(self, folder: Path, vectors: Sequence[Path], mllm: steering.MLLM):
        self.mllm, self.folders = mllm, list(vectors)
        self.model: Any = AutoModelForImageTextToText.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32
        ).eval()
        self.layers = self.model.model.language_model.layers
        self.stops = set(mllm.stop_ids)

    # -- a body --------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def answer(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the messages of an answer; raise WrongBody before the first where it cannot be answered."""
        sampling, twin = body["sampling"], body.get("twin")
        pictures = [Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB") for data in body["images"]]
        prompt = self._prompt(body["prompt"], pictures, body.get("size"), "prompt")
        spanned = self._spanned(body)
        leader = _Branch(self, prompt, spanned)
        second = None if twin is None else self._twin(twin, body, prompt, pictures, spanned)
        masks: list[dict[str, Any]] = []
        matcher = None
        if sampling["grammar"] is not None:
            matcher = Grammars(self.mllm).start(Grammar(sampling["grammar"]))
        drawn = torch.Generator().manual_seed(body["seed"])
        tokens, changed, text = list[int](), 0, ""
        reason = "length"
        while True:
            passed = leader.run(tokens)
            logits = passed.logits[-1]
            if matcher is not None:
                logits = Masks(len(logits), torch.device("cpu")).apply([matcher], logits[None])[0]
            if twin is not None:
                if "mask" in twin and (
                    not masks or (twin["mask"]["refresh"] and len(tokens) % twin["mask"]["refresh"] == 0)
                ):
                    second, mask = self._masked(twin["mask"], leader, passed, tokens, spanned)
                    masks.append(mask)
                assert second is not None
                contrasted = _contrasted(logits, second.run(tokens).logits[-1], twin["rule"])
                changed += int(contrasted.argmax() != logits.argmax())
                logits = contrasted
            logprobs = logits.log_softmax(-1)
            token = _sampled(logits, sampling, tokens, self.stops, drawn)
            tokens.append(token)
            message: dict[str, Any] = {"tokens": [token]}
            if sampling["logprobs"] is not None:
                top = logprobs.topk(max(1, sampling["logprobs"]))
                pairs = list(zip(top.indices.tolist(), top.values.tolist(), strict=True))[: sampling["logprobs"]]
                message |= {"logprobs": [float(logprobs[token])], "top": [pairs]}
            yield message
            if matcher is not None:
                matcher.advance(token)
            text = self.mllm.tokenizer.decode(tokens, skip_special_tokens=True)
            late = len(tokens) >= sampling["min_tokens"]
            if (token in self.stops and not sampling["ignore_eos"]) or (
                late and any(stop in text for stop in sampling["stop"])
            ):
                reason = "stop"
                break
            if len(tokens) >= sampling["max_tokens"]:
                break
        fed = body.get("fed", len(prompt.forced) + len(tokens) - 1)
        taken = self._taken(body, prompt, self.run(prompt, tokens[:-1], spanned), fed)
        if twin is not None:
            taken["twin"] = {"changed": changed, "masks": masks}
        yield {"ended": {"reason": reason, "reused": 0, "taken": taken}}

    def _prompt(self, given: dict[str, Any], pictures: list[Image.Image], size: Any, param: str) -> Prompt:
        """Return a prompt with its images' tokens in place of each placeholder; raise WrongBody unless its hash agrees."""
        tensors: dict[str, torch.Tensor] = {}
        counts: list[int] = []
        if pictures:
            more = {} if size is None else {"size": size}
            tensors = dict(self.mllm.processor.image_processor(pictures, return_tensors="pt", **more))
            counts = [int(grid.prod()) // 4 for grid in tensors["image_grid_thw"]]
        left, ids, images = iter(counts), list[int](), list[torch.Tensor]()
        forced = len(given["ids"]) - given["length"] + sum(count - 1 for count in counts)
        for token in given["ids"]:
            count = next(left) if token == self.mllm.image_token_id else 1
            if token == self.mllm.image_token_id:
                images.append(torch.arange(len(ids), len(ids) + count))
            ids += [token] * count
        plain = ids[: len(ids) - forced] if forced else ids
        digest = hashlib.sha256(torch.tensor(plain, dtype=torch.int32).numpy().tobytes()).hexdigest()
        if digest != given["sha256"]:
            raise WrongBody("The prompt's tokens differ.", f"{param}.sha256")
        classes = [label for label, count in given["classes"] for _ in range(count)]
        return Prompt(plain, tensors, classes, images, ids[len(plain) :])

    def _spanned(self, body: dict[str, Any]) -> Spanned:
        asked, think = body.get("steering"), body.get("think")
        if asked is None:
            return Spanned(think=think)
        config = self.model.config.text_config
        delta = torch.zeros(config.num_hidden_layers, asked["classes"], config.hidden_size)
        generated = torch.zeros(config.num_hidden_layers, config.hidden_size)
        for place, vector in enumerate(asked["vectors"]):
            direction, weight = self._vector(vector, f"steering.vectors[{place}]")
            for layer in vector["layers"]:
                added = vector["scale"] * weight[layer] * direction[layer]
                delta[layer, vector["classes"]] += added
                generated[layer] += added * vector["generated"]
        return Spanned(delta, generated, think)

    def _vector(self, vector: dict[str, Any], param: str) -> tuple[torch.Tensor, torch.Tensor]:
        for folder in self.folders:
            path = folder / f"{vector['name']}.safetensors"
            if path.is_file():
                with safe_open(path, "pt") as file:
                    if file.metadata()["sha256"] == vector["digest"]:
                        return file.get_tensor("direction"), file.get_tensor("weight")
        raise WrongBody(f"There is no vector {vector['name']!r} with this digest.", param)

    # -- twins ---------------------------------------------------------------------------------------------------------

    def _twin(
        self, twin: dict[str, Any], body: dict[str, Any], prompt: Prompt, pictures: list[Image.Image], spanned: Spanned
    ) -> _Branch | None:
        if "mask" in twin:
            return None
        if "noise" not in twin:
            return _Branch(self, self._prompt(twin["prompt"], pictures, body.get("size"), "twin.prompt"), spanned)
        signal, added = diffusion(twin["noise"]["step"])
        grids = prompt.tensors["image_grid_thw"].prod(-1).tolist()
        noised = []
        for pixels, seed in zip(prompt.tensors["pixel_values"].split(grids), twin["noise"]["seeds"], strict=True):
            shape = (len(pixels), 3, 1, pixels.shape[1] // 6)  # both frames of a still picture have the same noise
            noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).expand(-1, -1, 2, -1)
            noised.append(signal * pixels + added * noise.reshape(pixels.shape))
        tensors = {**prompt.tensors, "pixel_values": torch.cat(noised)}
        return _Branch(self, Prompt(prompt.ids, tensors, prompt.classes, prompt.images), spanned)

    def _masked(
        self, options: dict[str, Any], leader: _Branch, passed: Passed, tokens: list[int], spanned: Spanned
    ) -> tuple[_Branch, dict[str, Any]]:
        prompt = leader.prompt
        seen = passed.attention[options["layers"], -1].mean(0)
        head = self.model.get_output_embeddings().weight[passed.logits[-1].argmax()]
        chosen = [
            chosen_patches(seen[columns], activation_maps(passed.final[columns], head[None])[0], options["top"])
            for columns in prompt.images
        ]
        spans = [ImageSpan(columns, None) for columns in prompt.images]
        tensors = masked_pixels(prompt.tensors, spans, chosen)
        assert tensors is not None
        mask = {"token": len(tokens), "patches": [patches.nonzero()[:, 0].tolist() for patches in chosen]}
        return _Branch(self, Prompt(prompt.ids, tensors, prompt.classes, prompt.images), spanned), mask

    # -- measurements --------------------------------------------------------------------------------------------------

    def _taken(self, body: dict[str, Any], prompt: Prompt, passed: Passed, fed: int) -> dict[str, Any]:
        taken: dict[str, Any] = {}
        length = len(prompt.ids)
        n = length + fed
        passed.attention, passed.states = passed.attention[:, :n, :n], passed.states[:, :n]
        if (asked := body.get("attention")) is not None:
            labels = [label for label, count in asked["labels"] for _ in range(count)]
            one_hot = torch.zeros(n, max(labels) + 1)
            for column, label in enumerate(labels):
                if label >= 0:
                    one_hot[column, label] = 1.0
            by_label = passed.attention @ one_hot  # (layers, n, labels)
            rows = {
                name: [row for first, end in ranges for row in range(first, end)]
                for name, ranges in asked["rows"].items()
            }
            sums = {name: by_label[:, chosen].sum(1) for name, chosen in rows.items()}
            sums |= {"last": by_label[:, length - 1], "generated": by_label[:, length:].sum(1)}
            if asked["steps"]:
                sums["steps"] = by_label[:, length:].transpose(0, 1)
            taken["attention"] = {name: array_of(values) for name, values in sums.items()}
        if "state_position" in body:
            taken["states"] = array_of(passed.states[:, length + body["state_position"]])
            taken["next_logprobs"] = array_of(passed.logits[length - 1].log_softmax(-1))
        if "residual" in body:
            rows_of_answer = passed.states[:, length - 1 :]
            taken["residual"] = {"states": array_of(torch.stack([rows_of_answer.mean(1), rows_of_answer[:, -1]]))}
        if "steering" in body:
            classes = torch.nn.functional.one_hot(torch.tensor(prompt.classes), body["steering"]["classes"]).float()
            taken["steering"] = {"inverse": array_of(passed.inverse[:, : len(prompt.classes)] @ classes)}
        if "think" in body:
            taken["think"] = {"measured": array_of(passed.thought[:, :n].sum(1))}
        if (top := body["sampling"]["prompt_logprobs"]) is not None:
            scored = [*prompt.ids, *prompt.forced]
            logprobs = passed.logits[: len(scored) - 1].log_softmax(-1)
            following = torch.tensor(scored[1:])[:, None]
            own, best = logprobs.gather(1, following), logprobs.topk(top, dim=-1)
            ranks = 1 + (logprobs > own).sum(-1)
            arrays = {"logprobs": own[:, 0], "ranks": ranks, "top_ids": best.indices, "top_logprobs": best.values}
            taken["prompt_logprobs"] = {name: array_of(values) for name, values in arrays.items()}
        return taken

    # -- a pass --------------------------------------------------------------------------------------------------------

    def run(self, prompt: Prompt, tokens: list[int], spanned: Spanned) -> Passed:
        """Compute a prompt followed by tokens."""
        ids = torch.tensor([prompt.ids + prompt.forced + tokens])
        is_image = ids == self.mllm.image_token_id
        layers, n, width = len(self.layers), ids.shape[1], self.model.config.text_config.hidden_size
        states, inverse = torch.zeros(layers, n, width), torch.zeros(layers, n)
        thought = torch.zeros(layers, n, 2)
        added = None
        if spanned.delta is not None and spanned.generated is not None:
            classes = torch.tensor(prompt.classes)
            later = spanned.generated[:, None].expand(-1, n - len(classes), -1)
            added = torch.cat([spanned.delta[:, classes], later], 1)
        with _hooked(self.layers, states, inverse, thought, added, spanned.think):
            out = self.model(
                input_ids=ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=is_image.long(),
                use_cache=False, output_attentions=True, output_hidden_states=True, **prompt.tensors,
            )  # fmt: skip
        attention = torch.stack([weights[0].mean(0) for weights in out.attentions])
        return Passed(out.logits[0].float(), attention, states, inverse, thought, out.hidden_states[-1][0])


@dataclass
class _Branch:
    """A prompt with its interventions, and its pass over the latest tokens."""

    answers: PlainAnswers
    prompt: Prompt
    spanned: Spanned

    def run(self, tokens: list[int]) -> Passed:
        return self.answers.run(self.prompt, tokens, self.spanned)


@contextmanager
def _hooked(
    layers: Any,
    states: torch.Tensor,
    inverse: torch.Tensor,
    thought: torch.Tensor,
    added: torch.Tensor | None,
    think: dict[str, Any] | None,
) -> Iterator[None]:
    """Damp and steer in every layer, and note what was there."""
    updates: dict[int, torch.Tensor] = {}

    def of(layer: int) -> list[Callable[..., Any]]:
        def after_attention(module: Any, args: Any, output: Any) -> None:
            updates[layer] = output[0][0]

        def after_ffn(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
            differs = divergence(updates[layer], output[0])
            over = torch.zeros_like(differs) if think is None else (differs > think["thresholds"][layer]).float()
            thought[layer] = torch.stack([over, differs], -1)
            return output if think is None else output * (1 + (think["gamma"] - 1) * over)[None, :, None]

        def after_layer(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
            inverse[layer] = 1 / output[0].norm(dim=-1)
            out = output if added is None else output + added[layer]
            states[layer] = out[0]
            return out

        return [after_attention, after_ffn, after_layer]

    with ExitStack() as stack:
        for number, layer in enumerate(layers):
            for module, hook in zip((layer.self_attn, layer.mlp, layer), of(number), strict=True):
                stack.callback(module.register_forward_hook(hook).remove)
        yield


def _contrasted(full: torch.Tensor, twin: torch.Tensor, rule: dict[str, Any]) -> torch.Tensor:
    difference = (full - twin).relu() if rule["relu"] else full - twin
    out = full + rule["weight"] * difference
    if rule["plausible"]:
        out = out.masked_fill(full.softmax(-1) < rule["plausible"] * full.softmax(-1).max(), -torch.inf)
    return out.masked_fill(full == -torch.inf, -torch.inf)


def _sampled(
    logits: torch.Tensor, sampling: dict[str, Any], tokens: list[int], stops: set[int], drawn: torch.Generator
) -> int:
    logits = logits.clone()
    for token, bias in sampling["logit_bias"].items():
        logits[int(token)] += bias
    if len(tokens) < sampling["min_tokens"]:
        logits[list(stops)] = -torch.inf
    if sampling["temperature"] == 0:
        return int(logits.argmax())
    return int(torch.multinomial((logits / sampling["temperature"]).softmax(-1), 1, generator=drawn))
