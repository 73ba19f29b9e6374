"""The keys of compiled steps."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch

import steering
from steering.accel.tensors import TreeSpec, taken_apart
from steering.cpu.examples import EXAMPLES, INLINED, _hooks, example_sizes, example_step, manifest
from steering.cpu.keys import CODE
from steering.cpu.packing import PackedWeights
from steering.cpu.step import Variant, constants
from steering.cpu.steps import CompiledSteps
from steering.interventions.steer_rows import SteerRows
from tests.steering.conftest import LoadMLLM

ROOT = Path(steering.__file__).parent


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "llava"])
def test_steps_are_compiled_again_after_their_code_changed(family: str, load_mllm: LoadMLLM) -> None:
    run: set[Path] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(ROOT):
            run.add(file.relative_to(ROOT))

    variants = [Variant("prefill", "usual"), Variant("decode", "every")]
    for variant in [*variants, *([Variant("pictures")] if family == "qwen2_vl" else [])]:
        step, tensors = example_step(load_mllm(family), variant, None, PackedWeights(load_mllm(family)))
        arguments = step.arguments(EXAMPLES[0], tensors)
        sys.setprofile(note)
        try:
            with torch.inference_mode():
                step(*arguments)
        finally:
            sys.setprofile(None)
    assert {Path("decoder/attention.py"), Path("interventions/think.py")} <= run
    assert (Path("vision/attention.py") in run) is (family == "qwen2_vl")
    assert {file.parts[0] for file in run} <= {*CODE}


def test_a_step_accepts_only_hooks_of_its_sizes(load_mllm: LoadMLLM) -> None:
    """Rows and tokens may be of any number, but vectors for one picture of several have hooks of another class."""
    mllm, variant = load_mllm("qwen2_vl"), Variant("prefill", "usual")
    shape = example_step(mllm, variant, None, PackedWeights(mllm))[0].shape
    tree_spec = TreeSpec(shape, example_sizes(mllm, variant))
    for sizes in EXAMPLES:
        assert tree_spec.tensors(_hooks(mllm, variant, sizes)) is not None
    hooks = _hooks(mllm, variant, EXAMPLES[0])
    (steered,) = (hook for hook in hooks if isinstance(hook, SteerRows))
    for name, axis in (("_classes", 2), ("_delta", 2)):
        original = getattr(steered, name)
        setattr(steered, name, torch.cat([original, original.narrow(axis, 0, 1)], axis))
        assert taken_apart(hooks)[0] == shape
        assert tree_spec.tensors(hooks) is None
        setattr(steered, name, original)


def test_a_process_without_weights_traces_the_same_step() -> None:
    """The compiling process is told only what it cannot see: the dtypes of the weights."""
    served = steering.load()
    unread = steering.load(unread=served.fingerprint)
    weights = PackedWeights(served)
    assert {dtype for name, dtype in weights.dtypes.items() if name.startswith("weight")} == {"float16"}
    unread_step, served_step = (
        example_step(mllm, Variant("decode"), None, packed)[0]
        for mllm, packed in ((unread, PackedWeights(unread, weights.dtypes)), (served, weights))
    )
    for name, tensor in constants(served_step).items():
        if tensor.numel() <= INLINED:
            constants(unread_step)[name].data.copy_(tensor)
    assert manifest(unread_step) == manifest(served_step)


def test_a_single_package_keeps_its_number_of_threads(load_mllm: LoadMLLM) -> None:
    threads, package = torch.get_num_threads(), SimpleNamespace()
    steps = CompiledSteps(load_mllm("qwen2_vl"), threads=1)
    torch.set_num_threads(3)
    try:
        sole = CompiledSteps.of(steps, steps.wanted(Variant("decode")), package)  # type: ignore[arg-type]
    finally:
        torch.set_num_threads(threads)
    assert sole._team.threads == steps._team.threads == threads
