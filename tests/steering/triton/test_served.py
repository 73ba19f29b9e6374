"""The engine on what it runs on a GPU: fused modules, the decode attention kernel, and one graph for each number of rows.

There is no GPU here. What stands for the kernels is plain torch, what stands for a graph runs the captured call again.
"""

from __future__ import annotations

import functools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import steering
from steering import Diagnose, Generate, Request, Sage, Sampling, See, Think
from steering.accel import cuda_graphs
from steering.accel.cuda_graphs import DecodeGraphs
from steering.decoder import packed
from steering.interventions.look_at import LookAt
from steering.interventions.published.only import Only
from steering.interventions.published.opera import OperaSteering
from steering.interventions.published.vista import VistaSteering
from steering.model import loading
from steering.prompt.layout import build_prompt
from steering.protocol.readout import REGISTRY
from steering.recurrent import layers
from steering.recurrent.kernel import stepped
from steering.runner import selfcheck
from steering.triton import fusing, products
from tests import families
from tests.steering.accel.test_cuda_graphs import again
from tests.steering.cpu.conftest import check_alike
from tests.steering.interventions.pushes import unit_vector
from tests.steering.parallel.asking import drawn_vectors
from tests.steering.recurrent.modules import by_torch
from tests.steering.triton.reference import DecodeAttention, Ops

FAMILIES = ("qwen2_vl", "gemma3", "internvl", "qwen3_5", "lfm2_vl", "gpt_oss")


class Served:
    """A model as on a GPU beside the plain one."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, ops: Ops | None = None, dtype: str = "float32"):
        self.plain = steering.load(folder, device="cpu")
        self.ops, self.kernel = ops or Ops(), DecodeAttention()
        with monkeypatch.context() as patch:
            patch.setattr(packed, "prepare", lambda *_: None)  # what CPUs have instead
            patch.setattr(loading, "_store_weights_by_column", lambda *_: None)
            patch.setattr(layers, "step_kernel", lambda module: partial(stepped, partial(by_torch, module=module)))
            patch.setattr(fusing, "fuse", lambda model, decoder, device: fusing.fuse_by(self.ops, model, decoder))
            self.fused = steering.load(folder, device="cpu", dtype=dtype)
        self.fused.__dict__["decode_attention"] = self.kernel

    def engines(self, **options: Any) -> tuple[steering.Engine, steering.Engine, DecodeGraphs]:
        settings: dict[str, Any] = {"slots": 8, "max_length": 512, "self_check": False} | options
        plain, ours = (steering.Engine(mllm, **settings) for mllm in (self.plain, self.fused))
        graphs = DecodeGraphs(self.fused, captures=lambda: again)
        ours.core.runner.passes.use(graphs)
        return plain, ours, graphs


@pytest.fixture(params=FAMILIES)
def served(request: pytest.FixtureRequest, root: Path, monkeypatch: pytest.MonkeyPatch) -> Served:
    return Served(families.checkpoint(request.param, root), monkeypatch)


def chat() -> list[dict[str, Any]]:
    picture = Image.linear_gradient("L").resize((56, 56)).convert("RGB")
    return [{"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": "what"}]}]


def asked(mllm: steering.MLLM) -> list[Request]:
    vector, words = unit_vector(mllm), chat()
    everything = Diagnose(frozenset(REGISTRY), causal=True)
    text = [{"role": "user", "content": "what?"}]

    def ask(tokens: int, *interventions: Any, messages: Any = words, diagnose: Diagnose | None = None) -> Request:
        sampling = Sampling(max_tokens=tokens, ignore_eos=True, logprobs=2)
        return Request(messages, sampling, interventions, diagnose=diagnose)

    see, think = See(alpha=0.4, shallow=1), Think(threshold=0.01)
    return [
        ask(5, messages=text),
        ask(12, steering.Steer(vector, 0.5)),
        ask(9, Sage(see, think, Generate(refresh=4)), diagnose=everything),
        ask(7, See(alpha=0.3, reading="scale"), diagnose=Diagnose()),
        ask(12, steering.Pai(amplify=0.5, first_layer=0)),
        ask(3, messages=text, diagnose=everything),
    ]


def test_answers_are_those_of_the_plain_model(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that can be asked, alone and beside each other, while rows come and go."""
    plain, ours, graphs = served.engines()
    requests = asked(served.plain)
    batches = [requests, *([request] for request in requests)]
    expected = [plain.generate(batch) for batch in batches]
    for batch, answers in zip(batches, expected, strict=True):
        check_alike(answers, ours.generate(batch))
    assert graphs.taken >= 20
    assert min(served.kernel.calls, served.kernel.enhanced, served.kernel.looked) > 20
    assert {columns for _, columns in graphs._forms} == {ours.core.runner.pool.length}, "one number of columns"


def test_the_kernel_computes_the_layers_that_no_hook_reads(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(families.checkpoint("qwen2_vl", root), monkeypatch)
    plain, ours, graphs = served.engines()
    layers, words = served.plain.num_layers, chat()
    sampling = Sampling(max_tokens=6, ignore_eos=True, logprobs=2)
    vectors = drawn_vectors(served.plain)
    vista, mixing = VistaSteering(strength=0.3, directions=vectors), VistaSteering(strength=0, window=[1], alpha=0.9)
    look, pai, see = LookAt(bias=2.0, heads=[1]), steering.Pai(amplify=0.5, first_layer=0), See(alpha=0.4)
    kinds: list[tuple[int, tuple[Any, ...]]] = [
        (layers, (mixing,)),
        (layers, (vista,)),
        (layers, (look,)),
        (layers, (look, see)),
        (layers, (look, pai)),
        (layers - 1, (Only(layer=1),)),
        (layers - 1, (OperaSteering(scale=100.0, candidates=2),)),
        (layers - 1, (Only(layer=0), look)),
        (0, (Only(layer=1), see)),
    ]
    for kernel_layers, interventions in kinds:
        before, served.kernel.calls = graphs.taken + len(graphs), 0
        request = [Request(words, sampling, interventions, diagnose=["modality"])]
        check_alike(plain.generate(request), ours.generate(request))
        passes = graphs.taken + len(graphs) - before  # a capture is a pass, too
        assert passes >= 5
        assert served.kernel.calls == passes * kernel_layers, interventions
    length = ours.core.runner.pool.length
    assert {columns for _, columns in graphs._forms} == {length}, "a kernel reads each row's own"
    assert {form.columns for form in graphs._occasional} == {256, length}, "of torch's attention, and of VISTA"


def test_candidates_of_the_last_token_read_all_columns(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel takes a row that writes to the last column for padding."""
    served = Served(families.checkpoint("qwen2_vl", root), monkeypatch)
    plain, ours, _ = served.engines(max_length=64)
    ours.core.runner.passes.use(None)
    interventions = OperaSteering(scale=300.0, candidates=3, penalty=5.0), Think(threshold=0.01)
    count = 64 - build_prompt(served.plain, chat()).length
    asked = [Request(chat(), Sampling(max_tokens=count, ignore_eos=True, logprobs=2), interventions)]
    (expected,), (answer,) = plain.generate(asked), ours.generate(asked)
    assert expected.choices[0].applied["opera"] == answer.choices[0].applied["opera"]
    check_alike([expected], [answer])


def test_modules_are_fused_where_their_own_forward_gives_the_same(served: Served) -> None:
    layers = served.fused.layers
    ffns = [getattr(layer, "mlp", None) or layer.feed_forward for layer in layers]
    ffns = [ffn for ffn in ffns if not hasattr(ffn, "experts")]
    assert served.ops.calls["rms_norm"] > 2
    served.ops.calls.update(dict.fromkeys(served.ops.calls, 0))
    with torch.inference_mode():
        ids = torch.arange(5)[None]
        ours = served.fused.decoder(input_ids=ids, use_cache=False).last_hidden_state
        expected = served.plain.decoder(input_ids=ids, use_cache=False).last_hidden_state
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    silu = bool(ffns) and type(getattr(ffns[0], "act_fn", torch.nn.SiLU())).__name__ in ("SiLU", "SiLUActivation")
    assert served.ops.calls["silu_product"] == (served.fused.num_layers if silu else 0)
    parts = [(layers[at].self_attn, ("q_proj", "k_proj", "v_proj")) for at in served.fused.attention_layers]
    linear = "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"
    parts += [(layer.linear_attn, linear) for layer in layers if hasattr(layer, "linear_attn")]
    parts += [(ffn, ("gate_proj", "up_proj") if hasattr(ffn, "up_proj") else ("w1", "w3")) for ffn in ffns]
    for attention, names in parts:
        weights = [getattr(attention, name).weight for name in names]
        assert len({weight.untyped_storage().data_ptr() for weight in weights}) == 1, "views of one tensor"
    if served.fused.recurrent_layers:
        assert served.ops.calls["add_rms_norm"] == served.fused.num_layers


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_self_check_compares_with_modules_as_they_were(
    dtype: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Served(families.checkpoint("qwen2_vl", root), monkeypatch, dtype=dtype)
    graphs = functools.partial(DecodeGraphs, captures=lambda: again)
    monkeypatch.setattr(selfcheck, "DecodeGraphs", graphs)
    monkeypatch.setattr(packed, "pack", lambda *_: None)
    selfcheck.check_model(served.fused, fast=True)
    assert min(served.kernel.calls, served.ops.calls["add_rms_norm"]) > 10
    served.ops.calls.update(dict.fromkeys(served.ops.calls, 0))
    with selfcheck.plain(served.fused) as model, torch.inference_mode():
        model.get_decoder()(input_ids=torch.arange(5)[None], use_cache=False)
    assert not any(served.ops.calls.values())
    served.ops._wrong = 0.3  # behind what was tried at load
    with pytest.raises(steering.UnsupportedModel, match="served exactly"):
        selfcheck.check_model(served.fused, fast=True)


def test_a_fused_module_that_differs_is_not_used(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(families.checkpoint("qwen2_vl", root), monkeypatch, Ops(wrong=0.5))
    calls = served.ops.calls
    calls.update(dict.fromkeys(calls, 0))
    with torch.inference_mode():
        served.fused.decoder(input_ids=torch.arange(5)[None], use_cache=False)
    assert not any(calls.values())


def test_a_step_without_a_graph_runs_in_a_larger_one_and_is_captured_while_nothing_runs(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Served(families.checkpoint("qwen2_vl", root), monkeypatch)
    plain, ours, graphs = served.engines()
    words = [Request([{"role": "user", "content": "what?"}], Sampling(max_tokens=6, ignore_eos=True))] * 3
    ours.generate(words[:1])
    graphs.prepare([1, 8])
    (form,) = graphs._all_forms()
    assert set(form.graphs) == {1, 8}
    graphs.tried = True
    expected = [answer.choices[0].token_ids for answer in plain.generate(words)]
    before = graphs.taken
    assert [answer.choices[0].token_ids for answer in ours.generate(words)] == expected
    assert (set(form.graphs), graphs.taken) == ({1, 8}, before + 5)
    while graphs.prepare_next():
        pass
    assert set(form.graphs) == {1, 2, 4, 8}


def test_a_frequent_step_is_captured_while_answers_run(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "PATIENCE", 3)
    _, ours, graphs = Served(families.checkpoint("qwen2_vl", root), monkeypatch).engines()
    graphs.tried = True
    ours.generate([Request([{"role": "user", "content": "what?"}], Sampling(max_tokens=9, ignore_eos=True))])
    (form,) = graphs._all_forms()
    assert (set(form.graphs), graphs.taken) == ({1}, 8 - 3)


def test_matrix_vector_products_are_tried_for_fused_layers(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: set[tuple[int, ...]] = set()

    class Noting(Ops):
        def matvec(self, state: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            shapes.add(tuple(weight.shape))
            return super().matvec(state, weight, bias)

    monkeypatch.setattr(products, "LARGE", 0)
    monkeypatch.setattr(products, "COLD", 0)
    served = Served(families.checkpoint("qwen2_vl", root), monkeypatch, Noting(), dtype="bfloat16")
    calls, mlp, width = served.ops.calls, served.fused.layers[0].mlp, served.fused.hidden_size
    ffn = mlp.up_proj.out_features
    assert {(2 * ffn, width), (width, ffn), (served.fused.vocab_size, width)} <= shapes
    assert (ffn, width) not in shapes, "no part of a fused product is tried by itself"
    calls["matvec"] = 0
    with torch.inference_mode():
        served.fused.decoder(input_ids=torch.arange(1)[None], use_cache=False)
        assert calls["matvec"] == 4 * served.fused.num_layers, "q, k, v; output; gate, up; down"
        served.fused.decoder(input_ids=torch.arange(2)[None], use_cache=False)
    assert calls["matvec"] == 4 * served.fused.num_layers, "of two states by the library"
