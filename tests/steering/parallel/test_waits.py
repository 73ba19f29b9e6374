"""How often the host waits for a GPU: once a step, whatever is asked for, and never once a layer."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter

import pytest

EMBEDDING = ("model/mllm.py", "model/embedded.py")
"""Where transformers' own wrappers make a prompt's embeddings, and wait as often as they like."""
TOKENS, MASK = "runner/sampler.py", "interventions/generate.py"
"""Where a step's tokens come to the host, and where a mask does, of which the twin's prompt is made."""


@pytest.fixture(scope="module")
def waits() -> dict[str, list[list[str]]]:
    """By request, of each of its steps, the lines that waited."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.steering.parallel.waits"], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    found: dict[str, list[list[str]]] = json.loads(ran.stdout)
    return found


@pytest.mark.slow
def test_a_step_waits_for_its_tokens_alone(waits: dict[str, list[list[str]]]) -> None:
    assert {"plain", "all of sage", "vcd", "two images, read", "grammar", "reply"} <= waits.keys()
    for name, steps in waits.items():
        for number, lines in enumerate(steps[:-1]):
            counts = Counter(line.split(":")[0] for line in lines if not line.startswith(EMBEDDING))
            masks = counts.pop(MASK, 0)
            assert masks <= ("sage" in name or name == "generate"), (name, number, lines)
            assert counts.keys() <= {TOKENS}, (name, number, lines)
            # Behind a prompt comes the first token, and then the step's own; a leader that gets its twin has none for now.
            prefills = number == 0 or name in ("generate", "sampled", "all of sage", "vcd", "icd", "pai")
            assert counts[TOKENS] in ((0, 1, 2) if prefills else (1,)), (name, number, lines)


@pytest.mark.slow
def test_reading_out_an_answer_waits_for_no_layer_by_itself(waits: dict[str, list[list[str]]]) -> None:
    """Of eight layers."""
    for name, steps in waits.items():
        counts = Counter(line for line in steps[-1] if not line.startswith(EMBEDDING))
        assert max(counts.values()) <= 4, (name, counts)
        assert counts.total() <= 16 * (1 + ("baseline" in name)), (name, counts)
