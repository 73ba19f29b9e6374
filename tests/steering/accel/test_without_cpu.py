"""All but `steering.cpu` works where that is not there: nothing names it but the loader, and passes run eagerly."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
WITHOUT = """
import sys

class Deleted:
    def find_spec(self, name, path=None, target=None):
        if f"{name}.".startswith("steering.cpu."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Deleted())
"""
EXACT = """
import pytest

tests = ["interventions/test_steer.py", "interventions/test_sage.py", "readouts/test_readouts.py"]
exact = "qwen2_vl and (every_choice or as_defined or both_stages or equal_to_a_plain_pass)"
status = pytest.main([*(f"tests/steering/{name}" for name in tests), "-q", "-x", "-p", "no:cacheprovider", "-k", exact])
assert not [name for name in sys.modules if name.startswith("steering.cpu")]
assert not status
"""
ENGINE = """
import steering
from steering.core.compilation import pays

mllm = steering.load()
assert not pays(mllm)
engine = steering.Engine(mllm, slots=2, compiled=True)
request = steering.Request(
    [{"role": "user", "content": "what?"}], steering.Sampling(max_tokens=3), [steering.Sage(think=steering.Think())],
    diagnose=steering.Diagnose(),
)
plain = steering.Engine(mllm, slots=2)
answers = [one.generate([request])[0].choices[0] for one in (engine, plain)]
assert answers[0].token_ids == answers[1].token_ids and answers[0].diagnostics is not None
assert (engine.compilation.state, engine.stats()["compiled_in_use"], engine.stats()["compiled_steps"]) == ("off", 0, 0)
"""


def test_answers_are_exact_and_an_engine_runs_eagerly_without_the_cpu_backend() -> None:
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", WITHOUT + EXACT + ENGINE]
    ran = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    assert "steering.cpu is missing" in ran.stderr
    assert ran.stdout.count(".") > 8, "as many tests ran"
