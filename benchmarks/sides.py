"""The compared sides: the engine, plain `generate()`, and eager attention with `output_attentions`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForImageTextToText

import steering
from benchmarks.models import Workload
from steering import Diagnose, Generate, Grammar, Request, Sage, Sampling, See, Steer, Think
from steering.bench.asking import chat, words
from steering.core.compilation import pays
from steering.model.processing.processor import load_processor
from steering.protocol.readout import REGISTRY
from steering.runner import columns

TOKENS = 64
"""The number of tokens that every request generates, whatever the model says."""

SAGES = {
    "See": Sage(see=See()),
    "Think": Sage(think=Think(threshold=0.5)),
    "Generate": Sage(generate=Generate()),
    "SAGE": Sage(See(), Think(threshold=0.5), Generate()),
}
TEXTS = Grammar.json_schema({"type": "array", "items": {"type": "string"}, "minItems": 500})
"""A grammar of JSON that is longer than any answer here."""
FOCUS = Diagnose(include=frozenset({"focus", "modality"}))
EVERYTHING = Diagnose(include=frozenset(REGISTRY), causal=True)
"""The readouts whose cost is measured."""


def engine(workload: Workload, slots: int, **options: Any) -> steering.Engine:
    """Return an engine on the workload's model; neither its load-time check nor compiling is part of any figure."""
    mllm = steering.load(workload.folder, device="cpu")
    created = steering.Engine(mllm, slots=slots, max_length=workload.max_length, self_check=False, **options)
    if options.get("compiled") and not created.compilation.wait():
        raise RuntimeError("The decode step could not be compiled.")
    return created


def served(workload: Workload, slots: int) -> steering.Engine:
    """Return the same engine with compiled steps, where `helmsight serve` has them."""
    return engine(workload, slots, compiled=pays(steering.load(workload.folder, device="cpu")))


def run_engine(
    engine: steering.Engine,
    workload: Workload,
    seeds: Sequence[int],
    *,
    steers: Sequence[tuple[Steer, ...]] = (),
    diagnose: Diagnose | None = None,
    sage: Sage | None = None,
    tokens: int = TOKENS,
    grammar: Grammar | None = None,
) -> None:
    """Answer one prompt a seed with `tokens` tokens, all submitted at once; prompt i gets steers[i].

    A grammar must not end before that.
    """
    requests = [
        Request(
            messages=workload.messages(seed),
            sampling=Sampling(max_tokens=tokens, ignore_eos=grammar is None),
            interventions=[steers[i] if steers else None, sage],
            diagnose=diagnose,
            grammar=grammar,
        )
        for i, seed in enumerate(seeds)
    ]
    for result in engine.generate(requests):
        assert len(result.choices[0].token_ids) == tokens


class SamePictures:
    """New questions on pictures and a context that an engine has seen before, each to its first token."""

    def __init__(self, engine: steering.Engine, workload: Workload, diagnose: Diagnose | None = None):
        self.engine, self.workload, self.diagnose = engine, workload, diagnose
        self.content = workload.messages(0)[0]["content"]
        self.run([-1])

    def run(self, seeds: Sequence[int]) -> None:
        """Answer a question a seed with one token, all submitted at once."""
        *pictures, question = self.content
        context = question["text"].partition("\n")[0]
        requests = []
        for seed in seeds:
            new_question = self.workload.messages(seed)[0]["content"][-1]["text"].partition("\n")[2]
            content = [*pictures, {"type": "text", "text": f"{context}\n{new_question}"}]
            requests.append(
                Request([{"role": "user", "content": content}], Sampling(max_tokens=1), diagnose=self.diagnose)
            )
        self.engine.generate(requests)


def run_uneven(engine: steering.Engine, workload: Workload, seeds: Sequence[int], own: bool) -> None:
    """Answer one prompt a seed, of which the first fills its slot except for its answer.

    Rows read their `own` columns, or as many as the longest.
    """
    call_bytes = columns.CALL_BYTES["cpu"]
    if not own:
        columns.CALL_BYTES["cpu"] = 2**60  # no row gets a call of its own
    try:
        counts = [workload.max_length - TOKENS - 64, *[50] * (len(seeds) - 1)]
        chats = [chat(words(random.Random(seed), count)) for seed, count in zip(seeds, counts, strict=True)]
        engine.generate(Request(chat, Sampling(max_tokens=TOKENS, ignore_eos=True)) for chat in chats)
    finally:
        columns.CALL_BYTES["cpu"] = call_bytes


class Plain:
    """The checkpoint as transformers runs it, one request at a time, from messages to text."""

    def __init__(self, workload: Workload, attention: str = "sdpa"):
        self.workload = workload
        self.model: Any = AutoModelForImageTextToText.from_pretrained(
            workload.folder, dtype=torch.float32, attn_implementation=attention
        ).eval()
        self.processor: Any = load_processor(workload.folder)

    def run(self, seeds: Sequence[int], output_attentions: bool = False) -> None:
        """Answer one prompt a seed, one after the other, greedily."""
        for seed in seeds:
            chat = self.workload.messages(seed)
            inputs = self.processor.apply_chat_template(
                chat, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
            )
            with torch.inference_mode():
                out = self.model.generate(
                    **inputs, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False,
                    output_attentions=output_attentions, return_dict_in_generate=True,
                )  # fmt: skip
            length = inputs["input_ids"].shape[1]
            assert out.sequences.shape[1] == length + TOKENS
            self.processor.tokenizer.decode(out.sequences[0, length:])
