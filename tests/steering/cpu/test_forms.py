"""The forms of hooks in compiled steps against the hooks run eagerly: steps run here as they are traced, uncompiled."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from steering import MLLM, UnsupportedModel
from steering.accel.tensors import TreeSpec, as_json, kinds_of, of_json
from steering.cpu import steps as compiled_steps
from steering.cpu.examples import EXAMPLES, example_step
from steering.cpu.forms.interventions import FusedThink, NotedSee
from steering.cpu.forms.recorders import FusedCapture, FusedResidual
from steering.cpu.kernels.stream import damping
from steering.cpu.packages.package import Package
from steering.cpu.rehearsal import Rehearsal
from steering.cpu.start import VARIANTS, variants_of
from steering.cpu.step import Variant
from steering.cpu.steps import CompiledSteps
from steering.recorders.attention import DecodeCapture
from steering.recorders.residual import ResidualRows
from tests.steering.conftest import LoadMLLM

FED = {"decode": 4, "prefill": 6}
"""Tensors that a step of each kind is given before those of its hooks."""


class Uncompiled(Package):
    """A package whose library is the step itself."""

    def __init__(self, mllm: MLLM, steps: CompiledSteps, variant: Variant):
        wanted_step, fed = steps.wanted(variant), FED.get(variant.kind)
        step, inputs = example_step(mllm, variant, steps.axes, steps.weights)
        step(*step.arguments(EXAMPLES[0], inputs))  # which tells what hooks are afterwards

        def library(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            if fed is None:
                return step(*tensors)
            end = fed + len(inputs)
            return step(*tensors[:fed], tensors[fed:end], tensors[end:])

        tree = json.loads(json.dumps(as_json(step.left)))
        self._tree_spec = TreeSpec(wanted_step.shape, wanted_step.sizes)
        self._changes = self._tree_spec.changes(of_json(tree, kinds_of(wanted_step.shape.tree)))
        self._library: Any = library
        self._team, self._inputs, self._outputs, self.native = steps._team, [], [], None
        self.divisible, self._column = False, torch.zeros(0)


@pytest.fixture
def check(mllm: MLLM, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Compare a step with eager passes, as before a package is used."""
    monkeypatch.setattr(compiled_steps, "Loops", lambda *_: None)

    def checked(variant: Variant, mllm: MLLM = mllm) -> None:
        with torch.inference_mode():
            rehearsal = Rehearsal(mllm)
            steps = CompiledSteps(mllm, 1, rehearsal.axes)
            wanted_step = steps.wanted(variant)
            rehearsal.rehearse(wanted_step)
            rehearsal.check(steps, wanted_step, Uncompiled(mllm, steps, variant))

    return checked


@pytest.mark.parametrize("variant", VARIANTS, ids=" ".join)
def test_a_fused_step_leaves_the_same_state_as_an_eager_pass(variant: Variant, check: Any) -> None:
    check(variant)


def test_a_model_has_the_steps_that_it_can_take(check: Any, load_mllm: LoadMLLM) -> None:
    """A prefill of small Gemma 4 models needs more than embeddings, and their updates are not known."""
    assert variants_of(load_mllm("qwen2_vl")) == VARIANTS
    mllm = load_mllm("gemma4")
    mllm.column()
    decodes = [Variant("decode"), Variant("decode", "usual")]
    assert variants_of(mllm) == [decodes[0], Variant("pictures"), decodes[1]]
    for variant in decodes:
        check(variant, mllm)


def test_a_fused_prefill_reads_layers_with_a_window(check: Any, load_mllm: LoadMLLM) -> None:
    """Its second parts begin at different columns, and one is padded by more than a window beyond the other's end."""
    mllm = load_mllm("gemma4_large")
    mllm.column()
    check(Variant("prefill", "usual"), mllm)


@pytest.mark.parametrize(
    ("form", "name", "wrong"),
    [
        (FusedThink, "damping", staticmethod(lambda *arguments: 2 * damping(*arguments))),
        (NotedSee, "conclude", lambda hook, noted, positions: None),
        (FusedCapture, "settle", DecodeCapture.settle),  # which counts nothing
        (FusedResidual, "settle", ResidualRows.settle),
    ],
)
def test_a_fused_form_that_differs_is_detected(
    form: type, name: str, wrong: Any, check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(form, name, wrong)
    with pytest.raises(UnsupportedModel, match="differs from the eager one by"):
        check(Variant("decode", "every"))
