"""Families whose layers differ from the embedded model's, against plain transformers of the same environment.

Published configs state what these checkpoints would lack: newer transformers leave it to defaults that vLLM does not know.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import check_gpu
import pytest
from check_gpu import MARGIN, Reference, bodies, faults, save_vector
from helmsight_vllm.inputs import Refused
from helmsight_vllm.vectors import FOLDERS, load_vector
from served.naming import name_as_published

from plugin.engine import running

sys.path.append(str(Path(__file__).resolve().parents[3]))
from tests.families import build

INTERLEAVED = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 6, 6], "mrope_interleaved": True}
TWO_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}


@dataclass(frozen=True)
class Small:
    """A family's small checkpoint, which differs from that of other tests in its text and vision config.

    cannot: what the plugin does not offer for it.
    """

    text: dict[str, Any]
    vision: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    cannot: frozenset[str] = frozenset()


RECURRENT = frozenset({"pairs", "vcd", "generate"})
"""Contrasts, whose held tokens are computed twice, are nothing for states that each token changes."""
FAMILIES = {
    "qwen3_vl": Small({"head_dim": 32, "rope_parameters": INTERLEAVED}),
    "qwen3_5": Small(
        {
            "head_dim": 32, "rope_parameters": INTERLEAVED | {"partial_rotary_factor": 1.0}, "linear_num_key_heads": 1,
            "linear_num_value_heads": 2, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        },
        dtype="bfloat16",  # vLLM's kernel for CPUs takes no other
        cannot=RECURRENT,
    ),
    "lfm2_vl": Small(
        # vLLM's rotary kernel for CPUs rotates only the first head of this model's queries.
        {"num_attention_heads": 1, "num_key_value_heads": 1, "conv_dim": 64, "block_dim": 64, "tie_word_embeddings": True},
        {"vision_use_head": False},
        cannot=RECURRENT,
    ),
    "gemma4": Small({"head_dim": 32, "global_head_dim": 64}, {"default_output_length": 70}, cannot=frozenset({"think"})),
    "internvl": Small(TWO_HEADS),
}  # fmt: skip


def made(family: str, folder: Path) -> Path:
    """Return the folder of a family's small checkpoint, named as published ones are."""
    small = FAMILIES[family]
    build(family, folder, text=small.text, vision=small.vision)
    if family == "lfm2_vl":
        name_as_published(folder)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_and_states_are_those_of_plain_transformers(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain and steered answers have the tokens, the states after each layer, and the attention of attending layers."""
    small, folder = FAMILIES[family], made(family, tmp_path / family)
    reference = Reference(folder, "cpu")
    monkeypatch.setenv(FOLDERS, str(tmp_path))
    load_vector.cache_clear()
    every = bodies(reference, save_vector(reference.direction, tmp_path), True)
    if small.dtype == "bfloat16":  # the reference is float32
        monkeypatch.setattr(check_gpu, "TOLERANCE", 0.1)
        monkeypatch.setattr(check_gpu, "MARGIN", 100 * MARGIN)
    with running(folder, dtype=small.dtype) as engine:
        can = set(engine.worker.helmsight_facts()["can"])
        assert can.isdisjoint(small.cannot)
        assert {"steer", "states", "attention"} <= can
        assert ("pairs" in can) == ("pairs" not in small.cannot)
        contrasts = {name: every.pop(name) for name in [*every] if name.endswith("contrasted")}
        if "pairs" in can:
            every |= contrasts
        else:
            with pytest.raises(Refused, match="pairs"):
                engine.answer({"contrast": next(iter(contrasts.values()))[0]})
        found = engine.answer({name: body for name, (body, _) in every.items()})
    wrong = list[str]()
    for name, lines in found.items():
        assert "ended" in lines[-1], lines[-1]
        tokens = [token for line in lines[:-1] for token in line["tokens"]]
        wrong += faults(name, tokens, lines[-1]["ended"]["taken"], every[name][1], "float32")
    assert not wrong
