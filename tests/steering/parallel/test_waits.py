"""The number of host waits for a GPU: once per step, whatever is requested, and never once per layer."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests import families
from tests.steering.parallel import waits as program
from tests.steering.parallel.asking import computed_apart

EMBEDDING = ("model/mllm.py", "model/encoder.py", "model/embedded.py")
"""The files where transformers' wrappers encode pictures and compute a prompt's embeddings."""
EMBEDDED = {"idefics3": 4, "gemma4": 6, "lfm2_vl": 6}
"""The families that wait there, for what is not padding, for what has padding, for places and sizes, and how often."""
MASKS = "model/masks.py"
"""The file where a mask that the wrapper built is compared with a causal one, once a prompt."""
COMPARED = {"gemma3": "01", "paligemma": "1", "paligemma2": "1", "gemma4": "012"}
"""The families whose wrappers build masks, with the numbers of pictures of prompts whose masks are compared.

Where tokens of images attend to each other, none are after the first prompt with a picture.
"""
LAYERS = "decoder/updates.py"
KNOWN = "runner/prefix.py"
"""The file where the positions of a prompt's cached beginning are compared with its own."""
TOKENS, MASK = "runner/sampler.py", "interventions/generate.py"
VIEW = "interventions/published/agla.py"
"""The files where a step's tokens come to the host, and a mask from which the twin's prompt is made."""


Waits = dict[str, list[list[str]]]


@pytest.fixture(scope="module")
def counted(model: Path) -> dict[str, Any]:
    """Return the lines that waited in each step, by request, and by family and number of pictures; and what is unlike."""
    counts: dict[str, Any] = computed_apart(program.waits, model)
    return counts


@pytest.fixture(scope="module")
def waits(counted: dict[str, Any]) -> Waits:
    """Return the waits by request."""
    requests: Waits = counted["requests"]
    return requests


@pytest.mark.slow
def test_a_step_waits_only_for_its_tokens(waits: dict[str, list[list[str]]]) -> None:
    assert {"plain", "all of sage", "vcd", "two images, read", "grammar", "reply"} <= waits.keys()
    for name, steps in waits.items():
        # Of two answers, the first is read where it ends, a step before the last.
        for number, lines in enumerate(steps[: -2 if name == "steered until" else -1]):
            counts = Counter(line.split(":")[0] for line in lines if not line.startswith(EMBEDDING))
            masks, known_waits = counts.pop(MASK, 0) + counts.pop(VIEW, 0), counts.pop(KNOWN, 0)
            assert masks <= ("sage" in name or name in ("generate", "agla")), (name, number, lines)
            assert counts.keys() <= {TOKENS}, (name, number, lines)
            # Behind a prompt comes the first token, and then the step's own; a leader that gets its twin has none for now.
            prefills = number == 0 or name in (
                "generate",
                "sampled",
                "steered until",
                "all of sage",
                "vcd",
                "icd",
                "pai",
                "m3id",
                "agla",
            )
            assert counts[TOKENS] in ((0, 1, 2) if prefills else (1,)), (name, number, lines)
            assert known_waits <= (prefills and 1 + ("baseline" in name)), (name, number, lines)
    assert any(line.startswith(KNOWN) for steps in waits.values() for line in steps[0])


@pytest.mark.slow
def test_a_prompt_in_a_graph_waits_only_for_its_tokens(counted: dict[str, Any]) -> None:
    for name, (lines, graphs) in counted["in graphs"].items():
        assert graphs == 1, name
        assert {line.split(":")[0] for line in lines} - {KNOWN} == {TOKENS}, (name, lines)


@pytest.mark.slow
def test_a_prompt_s_embedding_waits_for_no_layer_of_its_vision_tower(waits: dict[str, list[list[str]]]) -> None:
    """The tower has two layers."""
    for name, steps in waits.items():
        for number, lines in enumerate(steps):
            counts = Counter(line for line in lines if line.startswith(EMBEDDING))
            prompts = 2 if "baseline" in name else 1
            assert counts.total() <= 3 * prompts, (name, number, lines)
    assert sum(line.startswith(EMBEDDING) for line in waits["sampled"][0]) <= 2  # two answers to one prompt


@pytest.mark.slow
def test_a_decode_waits_once_and_a_prompt_for_nothing_before_its_token_whatever_the_family(counted: Any) -> None:
    assert counted["families"].keys() == set(families.FAMILIES)
    for family, by_pictures in counted["families"].items():
        assert by_pictures.keys() >= {"1", "2"}
        for pictures, (prefill, decode) in by_pictures.items():
            # The products of experts wait on a CPU, and not on a GPU that has a kernel for them.
            experts = family == "qwen3_vl_moe"
            chunk, step = (
                Counter(line.split(":")[0] for line in lines if not (experts and line.startswith(LAYERS)))
                for lines in (prefill, decode)
            )
            assert step == {TOKENS: 1}, (family, pictures, decode)
            embedded = sum(chunk.pop(file, 0) for file in EMBEDDING)
            expected = family == "gemma4" if pictures == "0" else EMBEDDED.get(family, 0)  # its wrapper, for padding
            assert embedded == expected, (family, pictures, prefill)
            assert chunk.pop(MASKS, 0) <= 2 * (pictures in COMPARED.get(family, "")), (family, pictures, prefill)
            assert chunk == {TOKENS: 2}, (family, pictures, prefill)  # the first token, and the step's own


@pytest.mark.slow
def test_a_copy_of_a_prompt_waits_only_for_its_tokens(counted: dict[str, Any]) -> None:
    assert counted["forks"].keys() == {*program.FORKED}
    for family, steps in counted["forks"].items():
        waiting = Counter(line.split(":")[0] for lines in steps for line in lines)
        assert waiting.keys() - {*EMBEDDING} == {TOKENS}, (family, waiting)


@pytest.mark.slow
def test_the_decoder_receives_what_the_wrapper_by_itself_would_give_it_to_the_bit(counted: Any) -> None:
    assert counted["unlike"] == {family: [] for family in families.FAMILIES}


@pytest.mark.slow
def test_reading_out_an_answer_waits_for_no_layer_by_itself(waits: dict[str, list[list[str]]]) -> None:
    """The model has five layers."""
    for name, steps in waits.items():
        counts = Counter(line for line in steps[-1] if not line.startswith(EMBEDDING))
        assert max(counts.values()) <= 4, (name, counts)
        assert counts.total() <= 16 * (1 + ("baseline" in name)), (name, counts)
