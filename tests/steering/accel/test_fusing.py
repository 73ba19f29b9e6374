"""Norms and rotary embeddings by single kernels, beside transformers' own. There is no GPU here: what stands for the kernels
of triton computes the same on the CPU, and those themselves are tried where triton is."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers.models.gemma3 import modeling_gemma3 as gemma
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen

from steering.accel.fusing import fuse, fuse_by
from tests.steering.accel.reference import Ops

NAMES = ("apply_rotary_pos_emb", "apply_rotary_pos_emb_vision")


@pytest.fixture(autouse=True)
def put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """What models of a family share."""
    for family in (qwen, gemma):
        for name in NAMES:
            if hasattr(family, name):
                monkeypatch.setattr(family, name, getattr(family, name))


def norms(kind: type[nn.Module], dtype: torch.dtype) -> nn.Module:
    """Some norms with weights that are not 1."""
    made = nn.ModuleList(kind(width) for width in (24, 24, 8))
    for parameter in made.parameters():
        parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    return made.requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [qwen.Qwen2_5_VLRMSNorm, gemma.Gemma3RMSNorm])
def test_norms_are_ours_where_both_give_the_same(kind: type[nn.Module], dtype: torch.dtype) -> None:
    own, ours = norms(kind, dtype), Ops()
    taken = copy.deepcopy(own)
    fuse_by(ours, taken)
    before = ours.calls["rms_norm"]
    for one, other in zip(own, taken, strict=True):  # type: ignore[call-overload]
        states = torch.randn(2, 5, len(one.weight)).to(dtype)
        torch.testing.assert_close(other(states), one(states), rtol=2e-2 if dtype != torch.float32 else 1e-5, atol=1e-5)
    assert ours.calls["rms_norm"] == before + 3


def test_norms_stay_where_ours_gives_something_else() -> None:
    taken, wrong = norms(qwen.Qwen2_5_VLRMSNorm, torch.float32), Ops(wrong=0.5)
    fuse_by(wrong, taken)
    assert wrong.calls["rms_norm"] == 2  # with a weight as it is, and one to which 1 is added
    assert all("forward" not in vars(one) for one in taken)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("wrong", "taken"), [(0.0, True), (0.5, False)])
def test_rotary_embeddings_are_ours_on_a_gpu_where_both_give_the_same(wrong: float, taken: bool) -> None:
    plain = {name: getattr(qwen, name) for name in NAMES}
    ours = Ops(wrong)
    for _ in range(2):  # the second model of a family finds them there
        fuse_by(ours, norms(qwen.Qwen2_5_VLRMSNorm, torch.float32))
    assert [hasattr(getattr(qwen, name), "ours") for name in NAMES] == [taken, taken]
    if not taken:
        return
    assert ours.calls["rotated"] == 4, "of text and of pictures, two sizes each"
    seen, angle = torch.randn(5, 4, 12), torch.randn(5, 12)
    text = [torch.randn(2, heads, 5, 16).transpose(1, 2).contiguous().transpose(1, 2) for heads in (4, 2)]
    angles = [torch.randn(2, 5, 16) for _ in range(2)]
    for name, given in (
        ("apply_rotary_pos_emb", (*text, *angles)),
        (
            "apply_rotary_pos_emb_vision",
            (seen, seen + 1, angle, 1 - angle),
        ),
    ):
        found = getattr(qwen, name)
        for one, other in zip(found.ours(*given), plain[name](*given), strict=True):
            torch.testing.assert_close(one, other)
        before = ours.calls["rotated"]
        found(*given)
        assert ours.calls["rotated"] == before, "on the CPU it is the model's own"


def test_on_a_gpu_without_triton_the_model_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = norms(qwen.Qwen2_5_VLRMSNorm, torch.float32)
    monkeypatch.setattr("steering.accel.fusing.importlib.util", SimpleNamespace(find_spec=lambda name: None))
    fuse(taken, taken, torch.device("cuda"))
    assert all("forward" not in vars(one) for one in taken)  # type: ignore[attr-defined]


TRIED = """
import torch
from steering.accel import fusing, triton_ops
from transformers.models.gemma3 import modeling_gemma3 as gemma
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen
device = "cuda" if torch.cuda.is_available() else "cpu"
for dtype in (torch.float32, torch.float16, *([torch.bfloat16] if device == "cuda" else [])):  # else it is cut, not rounded
    tolerance = dict(rtol=0, atol=0) if dtype != torch.float32 else dict(rtol=1e-5, atol=1e-6)
    if device == "cuda" and dtype != torch.float32:
        tolerance = dict(rtol=1e-2, atol=1e-2)  # a GPU may round once where transformers does twice
    for kind, shifted in ((qwen.Qwen2_5_VLRMSNorm, False), (gemma.Gemma3RMSNorm, True)):
        norm = kind(96).to(device, dtype).requires_grad_(False)
        norm.weight.normal_()
        states = torch.randn(2, 5, 96, device=device, dtype=dtype) * 3
        eps = getattr(norm, "variance_epsilon", None) or norm.eps
        torch.testing.assert_close(triton_ops.rms_norm(states, norm.weight, eps, shifted), norm(states), **tolerance)
        assert fusing._shifted(triton_ops, norm) is shifted
    query, key = (torch.randn(2, 5, heads, 16, device=device, dtype=dtype).transpose(1, 2) for heads in (28, 4))
    for rows in (1, 2):
        angles = [torch.randn(rows, 5, 16, device=device, dtype=dtype) for _ in range(2)]
        for one, other in zip(fusing._of_text(triton_ops, query, key, *angles),
                              qwen.apply_rotary_pos_emb(query, key, *angles), strict=True):
            torch.testing.assert_close(one, other, **tolerance)
    query, key, _ = torch.randn(7, 3, 4, 20, device=device, dtype=dtype).unbind(1)
    angles = [torch.randn(7, 20, device=device) for _ in range(2)]
    for one, other in zip(fusing._of_vision(triton_ops, query, key, *angles),
                          qwen.apply_rotary_pos_emb_vision(query, key, *angles), strict=True):
        torch.testing.assert_close(one, other, **(tolerance if device == "cuda" else dict(rtol=1e-2, atol=1e-5)))
print("alike", device)
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="torch's builds for CPUs come without triton")
def test_tritons_kernels_give_what_transformers_does() -> None:
    """On a GPU, or else interpreted, which has to be said before triton is imported."""
    told = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", TRIED], env=os.environ | told, capture_output=True, text=True, check=False
    )
    assert "alike" in ran.stdout, ran.stderr[-3000:]
