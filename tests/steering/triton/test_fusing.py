"""Norms and rotary embeddings by single kernels, compared with transformers' own.

There is no GPU here: stand-ins compute the same on the CPU, and triton's kernels are tested where triton is.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers.models.gemma3 import modeling_gemma3 as gemma
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen

from steering.triton.fusing import fuse, fuse_by
from tests.steering.triton.reference import Ops

NAMES = ("apply_rotary_pos_emb", "apply_rotary_pos_emb_vision")


@pytest.fixture(autouse=True)
def put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the classes that models of a family share."""
    for family in (qwen, gemma):
        for name in NAMES:
            if hasattr(family, name):
                monkeypatch.setattr(family, name, getattr(family, name))


def norms(kind: type[nn.Module], dtype: torch.dtype) -> nn.Module:
    """Return norms with weights other than 1."""
    modules = nn.ModuleList(kind(width) for width in (24, 24, 8))
    for parameter in modules.parameters():
        parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    return modules.requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [qwen.Qwen2_5_VLRMSNorm, gemma.Gemma3RMSNorm])
def test_norms_are_replaced_if_the_kernel_gives_the_same(kind: type[nn.Module], dtype: torch.dtype) -> None:
    originals, ours = norms(kind, dtype), Ops()
    fused = copy.deepcopy(originals)
    fuse_by(ours, fused)
    before = ours.calls["rms_norm"]
    for original, replaced in zip(originals, fused, strict=True):  # type: ignore[call-overload]
        states = torch.randn(2, 5, len(original.weight)).to(dtype)
        torch.testing.assert_close(
            replaced(states), original(states), rtol=2e-2 if dtype != torch.float32 else 1e-5, atol=1e-5
        )
    assert ours.calls["rms_norm"] == before + 3


def test_norms_are_kept_if_the_kernel_differs() -> None:
    unfused, wrong = norms(qwen.Qwen2_5_VLRMSNorm, torch.float32), Ops(wrong=0.5)
    fuse_by(wrong, unfused)
    assert wrong.calls["rms_norm"] == 2  # with a weight as it is, and one to which 1 is added
    assert all("forward" not in vars(module) for module in unfused)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("wrong", "taken"), [(0.0, True), (0.5, False)])
def test_rotary_embeddings_are_replaced_on_a_gpu_if_the_kernel_gives_the_same(wrong: float, taken: bool) -> None:
    plain = {name: getattr(qwen, name) for name in NAMES}
    ours = Ops(wrong)
    for _ in range(2):  # the second model of a family finds them there
        fuse_by(ours, norms(qwen.Qwen2_5_VLRMSNorm, torch.float32))
    assert [hasattr(getattr(qwen, name), "ours") for name in NAMES] == [taken, taken]
    if not taken:
        return
    assert ours.calls["rotated"] == 4, "of text and of pictures, two sizes each"
    query, angle = torch.randn(5, 4, 12), torch.randn(5, 12)
    text = [torch.randn(2, heads, 5, 16).transpose(1, 2).contiguous().transpose(1, 2) for heads in (4, 2)]
    angles = [torch.randn(2, 5, 16) for _ in range(2)]
    for name, arguments in (
        ("apply_rotary_pos_emb", (*text, *angles)),
        (
            "apply_rotary_pos_emb_vision",
            (query, query + 1, angle, 1 - angle),
        ),
    ):
        rotary = getattr(qwen, name)
        for actual, expected in zip(rotary.ours(*arguments), plain[name](*arguments), strict=True):
            torch.testing.assert_close(actual, expected)
        before = ours.calls["rotated"]
        rotary(*arguments)
        assert ours.calls["rotated"] == before, "on the CPU it is the model's own"


def test_without_triton_the_model_is_unchanged_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    unfused = norms(qwen.Qwen2_5_VLRMSNorm, torch.float32)
    monkeypatch.setattr("steering.triton.fusing.importlib.util", SimpleNamespace(find_spec=lambda name: None))
    fuse(unfused, unfused, torch.device("cuda"))
    assert all("forward" not in vars(module) for module in unfused)  # type: ignore[attr-defined]
