"""Patch maps, token activation maps, residual readouts and anchors equal those of one plain eager pass over everything."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from steering import Choice, Diagnose, Generate, Request, RequestError, Sage, Sampling, See, Steer, Think
from steering.prompt.layout import Layout, build_prompt
from steering.prompt.spans import CONTEXT, QUESTION, USER
from steering.prompt.tiles import Tiling, tiling_of
from steering.readouts.patches import chosen_layers
from steering.recorders.interference import EarlierTokens, without_interference
from steering.recorders.residual import NAMES
from tests import families
from tests.steering.conftest import LoadPlain, MakeEngine
from tests.steering.plain import Messages, Plain, ffn_of, gates_of, scale_of, uncached
from tests.steering.readouts.matrices import chats, layout_span, vector

STEPS = 4
EVERYTHING = frozenset({"focus", "decay", "decay_layers", "residual", "patches", "tam", "flags", "anchor"})
FAMILIES = (
    "qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "lfm2_vl", "llava", "llava_next", "gemma3", "glm4v", "idefics3",
    "internvl", "gpt_oss",
)  # fmt: skip


class Whole:
    """A plain pass over a prompt and its answer, with everything kept."""

    def __init__(
        self,
        plain: Plain,
        chat: Messages,
        tokens: list[int],
        layout: Layout,
        added: torch.Tensor | None,
        think: Think | None = None,
    ):
        self.plain, self.tokens, self.layout, self.think = plain, tokens, layout, think
        self.tilings: list[Tiling | None] = [None] * len(layout.images)
        inputs = plain.inputs(chat)
        self.ids = inputs["input_ids"][0]
        self.updates: list[dict[str, torch.Tensor]] = [{} for _ in plain.layers]
        with self._hooked(added):
            out = uncached(plain.model, inputs, tokens[:-1], output_attentions=True, output_hidden_states=True)
        self.attention = torch.stack([layer[0].mean(0) for layer in out.attentions])  # (attending layers, n, n)
        self.attending = plain.attending
        self.states = out.hidden_states[-1][0]
        self.embedding = plain.model.get_output_embeddings().weight.detach()
        n = len(self.ids)
        self.generating = list(range(n - 1, n + len(tokens) - 1))
        behind = max(layout.image_columns.tolist(), default=-1)
        self.rows = [row for row in layout.columns(QUESTION).tolist() if row > behind]
        self.rows += range(n, n + len(tokens) - 1)

    @contextmanager
    def _hooked(self, added: torch.Tensor | None) -> Iterator[None]:
        handles = []

        def keep(layer: int, name: str) -> Any:
            scale = scale_of(self.plain.layers[layer]) if name == "ffn" else 1.0
            # The first of a batch, or of what experts return, with their scores.
            return lambda module, args, output: self.updates[layer].__setitem__(name, scale * output[0].flatten(0, -2))

        def before(layer: int) -> Any:
            def hook(module: Any, args: Any, kwargs: Any) -> None:
                self.updates[layer]["before"] = (args[0] if args else kwargs["hidden_states"])[0] * scale_of(module)

            return hook

        def after(layer: int) -> Any:
            def hook(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
                kept = self.updates[layer]
                kept["out"] = output[0]
                if self.think is not None:  # every update is damped
                    output = output - (1 - self.think.gamma) * kept["ffn"]
                return output if added is None else output + added[layer]

            return hook

        for number, layer in enumerate(self.plain.layers):
            norm = getattr(layer, "post_mlp_layernorm", None) or getattr(layer, "post_feedforward_layernorm", None)
            ffn, gate = ffn_of(layer), gates_of(layer)
            handles += [
                layer.register_forward_pre_hook(before(number), with_kwargs=True),
                (norm or ffn).register_forward_hook(keep(number, "ffn")),
                layer.register_forward_hook(after(number)),
            ]
            if isinstance(gate, torch.nn.Module):
                handles.append(gate.register_forward_hook(keep(number, "gate")))
        yield
        for handle in handles:
            handle.remove()

    def rho(self, layer: int, column: int) -> float:
        return float(self.attention[layer, self.rows, column].mean())

    def map(self, token: int, columns: list[int]) -> list[float]:
        return [max(0.0, float(self.states[column] @ self.embedding[token])) for column in columns]

    def causal(self, step: int, columns: list[int]) -> np.ndarray:
        """Return the map of a generated token minus the interference of earlier tokens, token by token."""
        spans = self.layout.spans.tolist()
        text = [i for i, span in enumerate(spans) if span in (CONTEXT, QUESTION, USER)]
        earlier = [(int(self.ids[i]), i) for i in text]
        earlier += [(self.tokens[i], self.generating[i]) for i in range(step)]
        own = np.array(self.map(self.tokens[step], columns))
        weights, maps = [], []
        for token, place in earlier:
            if token != self.tokens[step]:
                weights.append(max(0.0, float(self.states[place] @ self.embedding[self.tokens[step]])))
                maps.append(self.map(token, columns))
        if not sum(weights):
            return own
        interference = np.average(np.array(maps), axis=0, weights=weights)
        if not interference.any():
            return own
        ((scale,), *_) = np.linalg.lstsq(interference[:, None], own, rcond=None)
        return np.maximum(own - scale * interference, 0)

    def residual(self, kind: str = "answer") -> dict[str, list[float | None]]:
        names = (*NAMES, "neuron_ratio")
        n, end = len(self.ids), len(self.ids) + len(self.tokens) - 1
        rows = {"answer": range(n - 1, end), "prompt": range(n), "generated": range(n, end)}[kind]
        out: dict[str, list[float | None]] = {name: [] for name in names}
        for kept in self.updates:
            values: dict[str, list[float]] = {name: [] for name in names}
            if "gate" in kept:
                mlp = ffn_of(self.plain.layers[0])
                width = self.plain.model.config.get_text_config().intermediate_size
                act = getattr(mlp, "act_fn", getattr(mlp, "activation_fn", torch.nn.functional.silu))
                summed = sum(act(kept["gate"][row, :width]) for row in range(n, end))
                values["neuron_ratio"].append(sum(x > 0 for x in summed.tolist()) / width)
            for row in rows:
                h_in, ffn, h_out = (kept[name][row].double() for name in ("before", "ffn", "out"))
                mid = h_out - ffn
                values["mha_cosine"].append(float(h_in @ mid / h_in.norm() / mid.norm()))
                values["ffn_cosine"].append(float(mid @ h_out / mid.norm() / h_out.norm()))
                values["mha_change"].append(float((mid - h_in).norm() / h_in.norm()))
                values["ffn_change"].append(float(ffn.norm() / mid.norm()))
                values["mha_norm"].append(float((mid - h_in).norm()))
                values["ffn_norm"].append(float((h_out - mid).norm()))
                values["update_norm"].append(float((h_out - h_in).norm()))
                p, q = (mid - h_in).softmax(0), ffn.softmax(0)
                values["kl"].append(float((p * (p / q).log()).sum()))
                if "gate" in kept:
                    gate = kept["gate"][row]
                    values["gate_ratio"].append(sum(x > 0 for x in gate[:width].tolist()) / width)
            for name, found in values.items():
                out[name].append(sum(found) / len(found) if found else None)
        return out


def check(choice: Choice, whole: Whole, diagnose: Diagnose, focus_layers: int) -> None:
    got, layout = choice.diagnostics, whole.layout
    assert got is not None
    json.dumps(got, allow_nan=False)
    columns, overviews = [], []
    for image, told in zip(layout.images, whole.tilings, strict=True):
        columns.append(image.columns[slice(None) if told is None else told.order].tolist())
        overviews.append([] if told is None else image.columns[told.overview].tolist())
    layers = list(chosen_layers(diagnose, whole.attending))
    places = [whole.attending.index(layer) for layer in layers]
    for number, (patches, own) in enumerate(zip(got["patches"], columns, strict=True), start=1):
        assert (patches["image"], patches["layers"]) == (number, layers)
        expected = [[whole.rho(place, column) for column in own] for place in places]
        assert np.allclose(patches["rho"], expected, rtol=0, atol=1e-5)
        small = [[whole.rho(place, column) for column in overviews[number - 1]] for place in places]
        assert np.allclose(patches.get("overview", [[]] * len(layers)), small, rtol=0, atol=1e-5)
    assert [(one["position"], one["image"]) for one in got["tam"]] == [
        (step, image + 1) for step in range(STEPS) for image in range(len(columns))
    ]
    together = [c for own, small in zip(columns, overviews, strict=True) for c in (*own, *small)]
    activation = np.zeros(len(together))
    for step in range(STEPS):
        found = [v for one in got["tam"] if one["position"] == step for v in (*one["map"], *one.get("overview", []))]
        everywhere = layout.image_columns.tolist()  # tokens that end a row of tiles included
        own = whole.causal(step, everywhere) if diagnose.causal else whole.map(whole.tokens[step], everywhere)
        by_column = dict(zip(everywhere, own, strict=True))
        unreduced = dict(zip(everywhere, whole.map(whole.tokens[step], everywhere), strict=True))
        activation += np.array([unreduced[column] for column in together])  # flags go by the plain maps, causal or not
        assert np.allclose(found, [by_column[column] for column in together], rtol=1e-4, atol=1e-4)
    assert got["residual"]["rows"]["kind"] == diagnose.residual_rows
    for name, values in whole.residual(diagnose.residual_rows).items():
        for one, other in zip(got["residual"][name], values, strict=True):
            assert (one is None) == (other is None)
            near = 2e-3 if name == "gate_ratio" else 1e-5  # which counts numbers above zero, where some lie next to it
            assert one is None or one == pytest.approx(other, rel=1e-4, abs=near)
    last = got["decay"]["by_layer"]["vision"][-1]
    for layer, share in enumerate(last):
        row = whole.attention[layer, whole.generating[-1]]
        parts = [float(row[(layout_span(layout, kind))].sum()) for kind in ("vision", "system", "user")]
        assert share == (None if not sum(parts) else pytest.approx(parts[0] / sum(parts), abs=1e-5))
    if len(columns) < 2:
        assert got["anchor"] is None
    else:
        sigma = [
            [
                float(whole.attention[layer][layout.images[-1].columns][:, image.columns].mean())
                for image in layout.images[:-1]
            ]
            for layer in range(len(whole.attention))
        ]
        assert np.allclose(got["anchor"]["sigma"], sigma, rtol=0, atol=1e-5)
        means = np.mean(sigma[-focus_layers:], axis=0)
        assert got["anchor"]["image"] == (int(means.argmax()) + 1 if means.any() else None)
    attention = [sum(whole.rho(layer, c) for layer in range(len(whole.attention))) for c in together]
    concentration = got["flags"]["concentration"]
    for name, values in (("attention", np.array(attention)), ("activation", activation)):
        top = np.sort(values)[::-1][: -(-len(values) // 5)].sum()
        assert concentration[name] == (pytest.approx(top / values.sum(), rel=1e-3) if values.any() else None)
    if np.std(activation) > 0:
        correlation = np.corrcoef(attention, activation)[0, 1]
        assert concentration["agreement"] == pytest.approx(correlation, abs=1e-3)


@pytest.mark.parametrize(
    ("family", "budget"),
    [*((family, 40) for family in FAMILIES), *((family, 1000) for family in ("qwen2_vl", "gemma3", "gemma4_large"))],
)
def test_equal_to_a_plain_pass_in_a_batch_steered_or_not(
    family: str, budget: int, make_engine: MakeEngine, load_plain: LoadPlain
) -> None:
    engine = make_engine(family, prefill_budget=budget, max_length=1024)
    sampling = Sampling(max_tokens=STEPS, ignore_eos=True)
    steer = Steer(vector(engine.mllm), -0.8)
    *_, last = layers = load_plain(family).attending
    options = [
        Diagnose(EVERYTHING, causal=True),
        Diagnose(EVERYTHING, layers=(last, layers[0]), residual_rows="prompt"),
        Diagnose(EVERYTHING, last_layers=1, causal=True, residual_rows="generated"),
    ]
    requests = [
        Request(chat, sampling, (steer,) * (i == 1), diagnose=diagnose)
        for i, (chat, diagnose) in enumerate(zip(chats(), options, strict=True))
    ]
    neighbour = Request(chats()[0], Sampling(max_tokens=9, ignore_eos=True), diagnose=None)
    for i, (request, result) in enumerate(zip(requests, engine.generate([neighbour, *requests])[1:], strict=True)):
        (choice,) = result.choices
        layout = build_prompt(engine.mllm, request.messages).layout
        added = steer.delta if i == 1 else None
        whole = Whole(load_plain(family), request.messages, list(choice.token_ids), layout, added)
        pictures = families.images_of(request.messages)
        whole.tilings = [tiling_of(engine.mllm, *one) for one in zip(pictures, layout.images, strict=True)]
        assert request.diagnose is not None
        check(choice, whole, request.diagnose, engine.focus_layers)


@pytest.mark.parametrize("family", ["qwen2_vl", "gemma3"])
def test_each_of_several_answers_has_its_own(family: str, make_engine: MakeEngine, load_plain: LoadPlain) -> None:
    engine = make_engine(family, slots=3)
    diagnose = Diagnose(EVERYTHING, causal=True)
    request = Request(
        chats()[1], Sampling(max_tokens=STEPS, ignore_eos=True, temperature=1.5, seed=1), diagnose=diagnose, n=3
    )
    choices = engine.generate([request, request])[1].choices
    assert len({choice.token_ids for choice in choices}) > 1
    layout = build_prompt(engine.mllm, request.messages).layout
    for choice in choices:
        whole = Whole(load_plain(family), request.messages, list(choice.token_ids), layout, None)
        check(choice, whole, diagnose, engine.focus_layers)


def test_waiting_for_a_twin_changes_nothing(make_engine: MakeEngine) -> None:
    """A contrast of weight 0, whose twin is renewed at every other token, against no contrast."""
    diagnose = Diagnose(EVERYTHING, causal=True)
    sampling = Sampling(max_tokens=7, ignore_eos=True)
    base = Sage(See(alpha=0.3), Think(gamma=0.7, threshold=0.01))
    engine = make_engine("qwen2_vl")
    other = Request(chats()[0], Sampling(max_tokens=20, ignore_eos=True))  # so that waiting rows are stepped
    one, two = (
        engine.generate([Request(chats()[1], sampling, interventions=[sage], diagnose=diagnose), other])[0].choices[0]
        for sage in (base, base._replace(generate=Generate(weight=0.0, refresh=2)))
    )
    assert one.token_ids == two.token_ids
    assert one.diagnostics is not None
    assert two.diagnostics is not None
    for name in ("focus", "decay", "residual", "patches", "tam"):
        assert close(one.diagnostics[name], two.diagnostics[name]), name


def close(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(close(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(close(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == (pytest.approx(other, rel=1e-3, abs=1e-5) if isinstance(other, float) else other))


@pytest.mark.parametrize("family", ["qwen2_vl", "gemma3", "glm4v", "gemma4_large"])
def test_updates_are_read_before_think_damps_them(family: str, make_engine: MakeEngine, load_plain: LoadPlain) -> None:
    engine, think = make_engine(family), Think(gamma=0.3, threshold=0.0)
    rows: dict[str, Any] = {}
    for kind in ("answer", "prompt"):
        diagnose = Diagnose(frozenset({"residual"}), residual_rows=kind)
        request = Request(
            chats()[0],
            Sampling(max_tokens=STEPS, ignore_eos=True),
            interventions=[Sage(think=think)],
            diagnose=diagnose,
        )
        (choice,) = engine.generate([request])[0].choices
        assert choice.diagnostics is not None
        layout = build_prompt(engine.mllm, request.messages).layout
        whole = Whole(load_plain(family), request.messages, list(choice.token_ids), layout, None, think)
        rows[kind] = choice.diagnostics["residual"]["rows"]
        for name, values in whole.residual(kind).items():
            assert choice.diagnostics["residual"][name] == pytest.approx(values, rel=1e-4, abs=1e-5), name
    assert rows["answer"] == {"kind": "answer", "count": STEPS}
    assert rows["prompt"]["count"] == len(layout.spans)


def test_without_generated_rows_there_is_no_number_of_theirs(make_engine: MakeEngine) -> None:
    for kind, known in (("generated", False), ("answer", True), ("prompt", True)):
        diagnose = Diagnose(frozenset({"residual"}), residual_rows=kind)
        request = Request(chats()[0], Sampling(max_tokens=1), diagnose=diagnose)
        got = make_engine("qwen2_vl").generate([request])[0].choices[0].diagnostics
        assert got is not None
        assert all((value is not None) == known for value in got["residual"]["kl"])
        assert got["residual"]["neuron_ratio"] == [None] * families.LAYERS


@pytest.mark.parametrize("rows", ["mean", "last"])
@pytest.mark.parametrize("steps", [1, STEPS])
@pytest.mark.parametrize("family", ["qwen2_vl", "gemma3", "glm4v"])
def test_drift_is_between_the_rows_that_generate_answer_and_baseline(
    family: str, steps: int, rows: str, make_engine: MakeEngine, load_plain: LoadPlain
) -> None:
    engine, plain = make_engine(family), load_plain(family)
    steer = Steer(vector(engine.mllm), 0.8)
    request = Request(
        chats()[0], Sampling(max_tokens=steps, ignore_eos=True), (steer,), baseline=True,
        diagnose=Diagnose(frozenset({"drift"}), drift_rows=rows),
    )  # fmt: skip
    (choice,) = engine.generate([request])[0].choices
    assert choice.baseline is not None
    layout = build_prompt(engine.mllm, request.messages).layout
    states = []
    for one, added in ((choice, steer.delta), (choice.baseline, torch.zeros_like(steer.delta))):
        whole = Whole(plain, request.messages, list(one.token_ids), layout, added)
        every = [kept["out"][whole.generating] + push for kept, push in zip(whole.updates, added, strict=True)]
        both = torch.stack([torch.stack([state.mean(0) for state in every]), torch.stack([s[-1] for s in every])])
        states.append(both[0 if rows == "mean" else 1])
        assert one.answer_states is not None
        torch.testing.assert_close(one.answer_states, both, rtol=1e-3, atol=1e-3)
    expected = [float(a @ b / a.norm() / b.norm()) for a, b in zip(*states, strict=True)]
    assert choice.diagnostics is not None
    assert choice.diagnostics["drift"] == {
        "to": "baseline", "rows": rows, "cosine": pytest.approx(expected, abs=1e-5),
    }  # fmt: skip
    assert min(expected) < 0.999
    assert choice.baseline.diagnostics is not None
    assert choice.baseline.diagnostics["drift"] is None


def test_interference_by_hand() -> None:
    # Token 0 stands behind two text tokens: the first is itself, the second's map is twice [1, 1, 0].
    head = torch.tensor([[1.0, 0.0]])
    earlier = EarlierTokens(
        torch.tensor([7, 8, 7]),
        torch.tensor([[5.0, 0.0], [2.0, 0.0], [9.0, 0.0]]),
        torch.tensor([[9.0, 9.0, 9.0], [2.0, 2.0, 0.0], [0.0, 3.0, 4.0]]),
    )
    maps = torch.tensor([[0.0, 3.0, 4.0]])
    # Least squares of [0, 3, 4] on [2, 2, 0]: 6 / 8; what is left: [-1.5, 1.5, 4].
    out = without_interference(maps, torch.tensor([7]), head, 2, earlier)
    assert out.tolist() == [[0.0, 1.5, 4.0]]


@pytest.mark.parametrize("layers", [(3,), (-1,), (), (0, 0)])
def test_layers_that_do_not_exist_are_refused(layers: tuple[int, ...], make_engine: MakeEngine) -> None:
    request = Request(chats()[0], diagnose=Diagnose(frozenset({"patches"}), layers=layers))
    with pytest.raises(RequestError, match="from 0 to 2") as refused:
        make_engine("qwen2_vl").submit(request)
    assert refused.value.param == "diagnostics.layers"


def test_too_many_maps_are_refused_with_the_bound(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steering.protocol.readout.MAX_VALUES", 100)
    request = Request(chats()[0], Sampling(max_tokens=50), diagnose=Diagnose(frozenset({"tam"})))
    with pytest.raises(RequestError, match="at most 100 numbers") as refused:
        make_engine("qwen2_vl").submit(request)
    assert (refused.value.param, refused.value.code) == ("diagnostics", "too_many_maps")
    assert make_engine("qwen2_vl").generate([Request(chats()[0], Sampling(max_tokens=1), diagnose=request.diagnose)])


def test_without_images_there_are_no_maps(make_engine: MakeEngine) -> None:
    chat = [{"role": "user", "content": [{"type": "text", "text": "Hello there"}]}]
    request = Request(chat, Sampling(max_tokens=3, ignore_eos=True), diagnose=Diagnose(EVERYTHING, causal=True))
    got = make_engine("qwen2_vl").generate([request])[0].choices[0].diagnostics
    assert got is not None
    assert (got["patches"], got["tam"], got["flags"], got["anchor"]) == ([], [], None, None)
    assert len(got["residual"]["kl"]) == 3
