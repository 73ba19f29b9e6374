"""The two models of the benchmarks and their prompts: the embedded one, and a wider one with random weights.

`python -m benchmarks.models FOLDER` writes the latter for servers.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, Qwen2VLConfig, Qwen2VLForConditionalGeneration

from steering.bench.asking import chat, noise, words
from steering.bench.shapes import write_processor

DEMO = Path(__file__).parent.parent / "demo" / "checkpoint"


@dataclass(frozen=True)
class Workload:
    """A checkpoint and a kind of prompt for it.

    A prompt has `images` pictures of `size` pixels, a text context of `context` words and a question of `words`; a word is a
    token.
    """

    name: str
    folder: Path
    images: int
    size: tuple[int, int]
    context: int
    words: int
    max_length: int

    def messages(self, seed: int) -> list[dict[str, Any]]:
        """Return the prompt of a seed.

        The pictures are new at every call, so that no cache helps that would not help in practice.
        """
        rng = random.Random(seed)
        text, context = words(rng, self.words), words(rng, self.context)
        return chat(f"Text context: {context}\n{text}?", *(noise(self.size) for _ in range(self.images)))


def demo() -> Workload:
    """Return the embedded model with one of its pictures (9 image tokens) and a short question."""
    return Workload("demo", DEMO, images=1, size=(84, 84), context=8, words=30, max_length=512)


def wide(folder: Path, seed: int = 0) -> Workload:
    """Write a Qwen2-VL with hidden 512 and 8 layers, and return it with long prompts.

    A prompt has 2,000 tokens, 1,500 of them in 4 images and 100 in the question. The model is written to `folder` in
    bfloat16, as models are published, with the embedded model's tokenizer and picture processing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_processor(folder)
    config = json.loads((DEMO / "config.json").read_text())
    text = config["text_config"]
    text.update(hidden_size=512, num_attention_heads=8, num_key_value_heads=4, intermediate_size=1408)
    text.update(num_hidden_layers=8, layer_types=["full_attention"] * 8, max_position_embeddings=4096)
    text["rope_parameters"]["mrope_section"] = [8, 12, 12]
    config["vision_config"].update(hidden_size=512, depth=2)
    torch.manual_seed(seed)
    model = Qwen2VLForConditionalGeneration(Qwen2VLConfig.from_dict(config)).bfloat16()
    model.generation_config = GenerationConfig(eos_token_id=text["eos_token_id"], pad_token_id=text["pad_token_id"])
    model.save_pretrained(folder)
    return Workload("wide", folder, images=4, size=(25 * 28, 15 * 28), context=350, words=108, max_length=2304)


if __name__ == "__main__":
    print(f"{wide(Path(sys.argv[1])).folder} holds the wide model." if len(sys.argv) == 2 else __doc__)
