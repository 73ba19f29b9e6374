"""Prompts, and plain transformers as a model that answers them in batches."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import AutoImageProcessor, Qwen2VLForConditionalGeneration

from demo.model.tokenizer import IMAGE_TOKEN, TURN_END, VISION_END, load_tokenizer
from demo.world.scenes import squash

IMAGE_TOKENS = 9
BATCH = 64


@dataclass(frozen=True)
class DemoPrompt:
    """Pictures and a conversation whose image parts stand for them in order."""

    images: list[Image.Image]
    messages: list[dict[str, Any]]


Answerer = Callable[[Sequence[DemoPrompt]], list[str]]


def prompt(images: Sequence[Image.Image], text: str, system: str | None = None) -> DemoPrompt:
    """Return a prompt with pictures first, then the text, as most clients send them."""
    content = [{"type": "image"} for _ in images] + [{"type": "text", "text": text}]
    before = [{"role": "system", "content": system}] if system else []
    return DemoPrompt(list(images), [*before, {"role": "user", "content": content}])


class PlainModel:
    """transformers' own model and `generate`, greedy, in float32; an `Answerer`."""

    def __init__(self, checkpoint: Path | str, threads: int = 2) -> None:
        torch.set_num_threads(threads)
        self.tokenizer = load_tokenizer(checkpoint)
        self.processor = AutoImageProcessor.from_pretrained(checkpoint)
        self.model = Qwen2VLForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32).eval()
        self.image_id = self.model.config.image_token_id
        self.side: int = json.loads(Path(checkpoint, "helmsight.json").read_text())["image_size"][0]

    @torch.no_grad()
    def __call__(self, prompts: Sequence[DemoPrompt], tokens: int = 80) -> list[str]:
        answers = []
        for start in range(0, len(prompts), BATCH):
            inputs = self.inputs(prompts[start : start + BATCH], "left")
            output = self.model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
            answers += self.tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return answers

    def text(self, prompt: DemoPrompt) -> str:
        text = self.tokenizer.apply_chat_template(prompt.messages, tokenize=False, add_generation_prompt=True)
        return text.replace(IMAGE_TOKEN, IMAGE_TOKEN * IMAGE_TOKENS)

    def inputs(
        self, prompts: Sequence[DemoPrompt], side: str, answers: Sequence[str] | None = None
    ) -> dict[str, Tensor]:
        """Return padded model inputs; with `answers`, each prompt is followed by its answer."""
        texts = [self.text(prompt) + (answers[i] if answers else "") for i, prompt in enumerate(prompts)]
        self.tokenizer.padding_side = side
        encoded = self.tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        inputs = {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"]}
        inputs["mm_token_type_ids"] = (inputs["input_ids"] == self.image_id).int()
        if images := [squash(image, self.side) for picture in prompts for image in picture.images]:
            pixels = self.processor(images=images, return_tensors="pt")
            inputs |= {"pixel_values": pixels["pixel_values"], "image_grid_thw": pixels["image_grid_thw"]}
        return inputs

    @torch.no_grad()
    def image_attention(self, prompts: Sequence[DemoPrompt], answers: Sequence[str]) -> list[Tensor]:
        """Return the image-attention factor sigma (layers, images) of each prompt with its answer.

        Mean over heads, over the question rows (user text after the last picture) and the answer's rows, over the picture's
        tokens (implicit-visual-misunderstanding, section 3).
        """
        self.model.set_attn_implementation("eager")
        end, turn = (self.tokenizer.convert_tokens_to_ids(token) for token in (VISION_END, TURN_END))
        results = []
        for start in range(0, len(prompts), 16):
            batch = prompts[start : start + 16]
            inputs = self.inputs(batch, "right", answers[start : start + 16])
            attentions = self.model(**inputs, output_attentions=True, use_cache=False).attentions
            weights = torch.stack([layer.mean(1) for layer in attentions], 1)  # (prompts, layers, rows, columns)
            for i, prompt in enumerate(batch):
                ids = inputs["input_ids"][i, : int(inputs["attention_mask"][i].sum())].tolist()
                first = len(ids) - ids[::-1].index(end)
                last = first + ids[first:].index(turn)
                answer_start = len(self.tokenizer(self.text(prompt), add_special_tokens=False)["input_ids"])
                rows = [*range(first, last), *range(answer_start, len(ids))]
                columns = torch.tensor([k for k, token in enumerate(ids) if token == self.image_id])
                picked = weights[i][:, rows][:, :, columns].mean(1)  # (layers, image tokens)
                results.append(picked.view(picked.shape[0], len(prompt.images), IMAGE_TOKENS).mean(-1))
        self.model.set_attn_implementation("sdpa")
        return results
