"""SAGE's stages against plain transformers: eager attention whose weights are changed, hooks on the sub-blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import steering
from steering import Diagnose, Engine, Request, RequestError, Sampling, load
from steering.interventions.generate import Sage
from steering.interventions.see import READINGS, Reading, See, SeeSlots
from steering.interventions.think import Think
from steering.prompt.layout import build_prompt
from steering.prompt.spans import FIRST_IMAGE, QUESTION, SYSTEM
from steering.protocol.slots import PrefillChunk
from tests import families
from tests.steering.conftest import OF_EACH_KIND, LoadMLLM, LoadPlain, a_pool, a_sequence
from tests.steering.interventions.references import scores_changed
from tests.steering.interventions.settings import check_refused
from tests.steering.plain import Plain, scale_of

STEPS = 6
CHECKPOINT = Path(__file__).parents[3] / "demo" / "checkpoint"
FAMILIES = (
    "qwen2_vl",
    "llava",
    "gemma3",
    "glm4v",
    "internvl",
    "paligemma2",
    "gemma4_large",
)  # four of them normalise behind sub-blocks
SEES = {
    "scale": See(alpha=0.7, reading="scale"),
    "transfer": See(alpha=0.6),
    "add": See(alpha=0.7, reading="add"),
    "content": See(alpha=0.6, spans="content"),
    "from system": See(alpha=0.6, source="system"),
    "from user": See(alpha=0.6, source="user", spans="content"),
    "deep": See(alpha=0.9, reading="scale", shallow=0),
    "all layers": See(alpha=0.5, shallow=families.LAYERS),
}


class Reference:
    """Plain generation in which attention and FFN updates are changed by the paper's definitions, token by token."""

    def __init__(self, plain: Plain, spans: torch.Tensor, see: See | None, think: Think | None):
        self.plain, self.see, self.think = plain, see, think
        self.visual = spans >= FIRST_IMAGE
        content = see is not None and see.spans == "content"
        self.text = (spans >= SYSTEM) & ~self.visual if content else ~self.visual
        first = int(self.visual.nonzero()[0])
        if see is not None and see.source == "system":
            self.text[first:] = False
        if see is not None and see.source == "user":
            self.text[:first] = False
        self.has_sinks = hasattr(plain.layers[0].self_attn, "sinks")
        self.first: dict[int, float] = {}
        self.alphas: list[dict[int, float]] = []  # by generated token and layer
        self.damped: list[list[bool]] = [[] for _ in plain.layers]
        self.divergences: list[list[float]] = [[] for _ in plain.layers]

    def answer(self, inputs: dict[str, torch.Tensor], steps: int = STEPS) -> tuple[list[int], torch.Tensor]:
        """Greedy tokens and logits (steps, vocabulary).

        Attentions are asked for, because Gemma 4 would compute some layers for a prompt's last row alone.
        """
        with scores_changed(self.plain, lambda layer, scores, start: scores, self._enhance), self._updates():
            out = self.plain.model.generate(
                **inputs, max_new_tokens=steps, min_new_tokens=steps, do_sample=False,
                output_logits=True, output_attentions=True, return_dict_in_generate=True,
            )  # fmt: skip
        return out.sequences[0, inputs["input_ids"].shape[1] :].tolist(), torch.cat(out.logits).float()

    def _enhance(self, layer: int, weights: torch.Tensor) -> torch.Tensor:
        if self.see is None:
            return weights
        heads, rows, columns = weights.shape
        if rows == 1 and layer == 0:
            self.alphas.append({})
        generated = torch.zeros(len(self.alphas), dtype=torch.bool)
        visual = torch.cat([self.visual, generated])[-columns:]  # a window keeps the latest columns
        text = torch.cat([self.text, generated])[-columns:]
        share = float(weights[:, -1, visual].sum(-1).mean())
        if rows > 1:
            self.first[layer] = share
        depth = max(1, len(self.plain.layers) // 4) if self.see.shallow is None else self.see.shallow
        if layer < depth:
            alpha = self.see.alpha
        else:
            decay = 0.0 if rows > 1 or self.first[layer] == 0 else 1 - share / self.first[layer]
            alpha = self.see.alpha * max(0.0, decay)
        if rows == 1:
            self.alphas[-1][layer] = alpha
        out = weights.clone()
        for head in range(heads):
            for row in range(rows):
                w = out[head, row]
                image_attention, read = float(w[visual].sum()), float(w[text].sum())
                if image_attention == 0:
                    continue
                if self.see.reading != "transfer":
                    to_sinks = float(1 - w.sum()) if self.has_sinks else 0.0
                    w[visual] *= 1 + alpha
                    w /= float(w.sum()) + to_sinks if self.see.reading == "scale" else 1
                else:
                    w[visual] += alpha * read * w[visual] / image_attention
                    w[text] *= 1 - alpha
        return out

    @contextmanager
    def _updates(self) -> Iterator[None]:
        handles, state = [], {}

        def before(layer: int) -> Any:
            return lambda module, args, kwargs: state.__setitem__(
                layer, scale_of(self.plain.layers[layer]) * (args[0] if args else kwargs["hidden_states"])
            )

        def ffn(layer: int) -> Any:
            factor = scale_of(self.plain.layers[layer])
            return lambda module, args, output: state.__setitem__(("ffn", layer), factor * output)

        def after(layer: int) -> Any:
            def hook(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
                update = state["ffn", layer]
                mha = output - update - state[layer]
                p, q = mha.softmax(-1), update.softmax(-1)
                d = (p * (p / q).log()).sum(-1)
                damped = d > self.think.threshold
                self.damped[layer] += damped[0].tolist()
                self.divergences[layer] += d[0].tolist()
                return state[layer] + mha + torch.where(damped[..., None], self.think.gamma, 1.0) * update

            return hook

        if self.think is not None:
            for number, layer in enumerate(self.plain.layers):
                norm = getattr(layer, "post_mlp_layernorm", None) or getattr(layer, "post_feedforward_layernorm", None)
                handles += [
                    layer.register_forward_pre_hook(before(number), with_kwargs=True),
                    (norm or layer.mlp).register_forward_hook(ffn(number)),
                    layer.register_forward_hook(after(number)),
                ]
        yield
        for handle in handles:
            handle.remove()


def check(
    family: str, sage: Sage, load_mllm: LoadMLLM, load_plain: LoadPlain, engine: Engine, images: int = 2
) -> tuple[Any, Reference]:
    """Compare the engine's answer with the reference's; returns the choice and the reference."""
    chat = families.example_messages(family, images, system="Answer in one word." if family != "paligemma2" else None)
    prompt = build_prompt(load_mllm(family), chat)
    plain = load_plain(family)
    reference = Reference(plain, prompt.layout.spans, sage.see, sage.think)
    tokens, logits = reference.answer(plain.inputs(chat))
    sampling = Sampling(max_tokens=STEPS, ignore_eos=True, logprobs=5)
    choice = engine.generate([Request(chat, sampling, interventions=[sage])])[0].choices[0]
    assert list(choice.token_ids) == tokens
    for got, row in zip(choice.logprobs, logits.log_softmax(-1), strict=True):
        assert got.logprob == pytest.approx(float(row[got.token_id]), abs=1e-4)
        for token in got.top:
            assert token.logprob == pytest.approx(float(row[token.token_id]), abs=1e-4)
    return choice, reference


@pytest.fixture
def plainly(load_plain: LoadPlain) -> Callable[[str], list[int]]:
    """Return the tokens of the plain model, to make sure that an intervention has an effect."""
    return lambda family: load_plain(family).answer(families.example_messages(family, 2), STEPS).tokens


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *((family, name) for family in ("qwen2_vl", "gemma3") for name in SEES),
        *((family, "transfer") for family in ("llava", "glm4v", "internvl", "gemma4", "gemma4_large")),
        *(("paligemma2", name) for name in ("scale", "transfer")),
        *(("gpt_oss", name) for name in ("scale", "transfer", "add", "content")),
    ],
)
def test_see_changes_attention_as_defined(
    family: str, name: str, load_mllm: LoadMLLM, load_plain: LoadPlain, make_engine: Any
) -> None:
    see = SEES[name]
    choice, reference = check(family, Sage(see), load_mllm, load_plain, make_engine(family))
    report = choice.applied["sage"]["see"]
    for mean, greatest, alphas in zip(report["alpha"], report["alpha_max"], reference.alphas, strict=True):
        assert mean == pytest.approx(sum(alphas.values()) / families.LAYERS, abs=1e-4)
        assert greatest == pytest.approx(max(alphas.values()), abs=1e-4)
    assert len(report["alpha"]) == STEPS - 1
    if name != "deep":
        assert report["share_after"] > report["share_before"]


@pytest.mark.parametrize("family", FAMILIES)
def test_think_damps_updates_as_defined(
    family: str, load_mllm: LoadMLLM, load_plain: LoadPlain, make_engine: Any
) -> None:
    plain = load_plain(family)
    chat = families.example_messages(family, 2)
    spans = build_prompt(load_mllm(family), chat).layout.spans
    probe = Reference(plain, spans, None, Think(threshold=1e9))
    probe.answer(plain.inputs(chat))
    values = torch.tensor([d for layer in probe.divergences for d in layer]).sort().values
    middle = values[int(0.4 * len(values)) : int(0.6 * len(values))]
    widest = int((middle[1:] / middle[:-1]).argmax())  # processors round a value next to the threshold to either side
    think = Think(gamma=0.3, threshold=float(middle[widest : widest + 2].mean()))
    choice, reference = check(family, Sage(think=think), load_mllm, load_plain, make_engine(family))
    report = choice.applied["sage"]["think"]
    # A value within rounding of the threshold may fall on either side.
    for layer in range(families.LAYERS):
        assert report["suppressed"][layer] == pytest.approx(
            sum(reference.damped[layer]) / len(reference.damped[layer]), abs=0.02
        )
        mean = sum(reference.divergences[layer]) / len(reference.divergences[layer])
        assert report["divergence"][layer] == pytest.approx(mean, rel=1e-3)
    assert 0.2 < sum(report["suppressed"]) / families.LAYERS < 0.8


@pytest.mark.parametrize("family", ["qwen2_vl", "gemma3", "gemma4_large"])
def test_both_stages_together_and_in_chunks_are_exact(
    family: str, load_mllm: LoadMLLM, load_plain: LoadPlain, make_engine: Any
) -> None:
    sage = Sage(See(alpha=0.5, reading="transfer"), Think(gamma=0.5, threshold=0.01))
    check(family, sage, load_mllm, load_plain, make_engine(family))
    check(family, sage, load_mllm, load_plain, make_engine(family, prefill_budget=16))


@pytest.mark.parametrize("family", OF_EACH_KIND)
def test_neutral_settings_are_plain_decoding(family: str, make_engine: Any) -> None:
    sage = Sage(See(alpha=0.0), Think(gamma=1.0, threshold=0.0))
    chat = families.example_messages(family, 2)
    sampling = Sampling(max_tokens=STEPS, ignore_eos=True, logprobs=2)
    plain, neutral = (
        make_engine(family).generate([Request(chat, sampling, interventions=[interventions])])[0].choices[0]
        for interventions in (None, sage)
    )
    assert plain.token_ids == neutral.token_ids
    assert plain.logprobs == neutral.logprobs


@pytest.mark.parametrize("family", ["qwen2_vl", "gemma3"])
def test_see_in_half_precision_differs_by_rounding_alone(
    family: str, load_mllm: LoadMLLM, load_plain: LoadPlain, root: Path
) -> None:
    """The first token's distribution is as far from float32, up to a factor of three, as the plain model's.

    It is compared before rounding can choose another token.
    """
    chat, plain = families.example_messages(family, 2), load_plain(family)
    spans, inputs = build_prompt(load_mllm(family), chat).layout.spans, plain.inputs(chat)
    sampling = Sampling(max_tokens=STEPS, ignore_eos=True, logprobs=20)
    sees = [None, *SEES.values()]
    rows = [Reference(plain, spans, see, None).answer(inputs, 1)[1][0].log_softmax(-1) for see in sees]
    for dtype in (torch.bfloat16, torch.float16):
        engine = Engine(load(families.checkpoint(family, root), dtype=dtype), self_check=False)
        errors = []
        for see, row in zip(sees, rows, strict=True):
            request = Request(chat, sampling, interventions=[Sage(see) if see else None])
            choice = engine.generate([request])[0].choices[0]
            assert all(math.isfinite(token.logprob) for token in choice.logprobs)
            difference = torch.tensor([token.logprob - float(row[token.token_id]) for token in choice.logprobs[0].top])
            errors.append(float(difference.square().mean().sqrt()))
        assert max(errors[1:]) <= 3 * errors[0], dict(zip(SEES, errors[1:], strict=True))


@pytest.mark.parametrize("attention", [0.0, 1e-42, 1e-37, 1e-20, 1e-9, 0.3])
@pytest.mark.parametrize("reading", READINGS)
def test_attention_sums_to_what_the_reading_says_even_if_a_head_hardly_looks(
    reading: Reading, attention: float
) -> None:
    slots = SeeSlots("sage.see", a_pool(1, 4, 1))
    sequence = a_sequence([-1, FIRST_IMAGE, FIRST_IMAGE, QUESTION], See(alpha=0.5, reading=reading, shallow=1))
    slots.place(sequence)
    rows = slots.prefill(PrefillChunk([sequence], [0], [4], complete=True))
    weights = torch.tensor([0.5, attention, attention / 2, 0.5 - 1.5 * attention])[None, None, None]
    enhanced = rows.weights(0, weights)[0, 0, 0]
    total = 1 + 0.5 * 1.5 * attention if reading == "add" else 1.0
    assert float(enhanced.sum()) == pytest.approx(total, abs=1e-6)
    if attention > 1e-30:
        assert float(enhanced[1] / enhanced[2]) == pytest.approx(2.0, rel=1e-4)


def test_heads_that_hardly_look_do_not_break_half_precision() -> None:
    """The embedded model has heads whose attention to the image half precision cannot tell from none."""
    chat = [
        {
            "role": "user",
            "content": [{"type": "image", "image": families.example_image(0)}, {"type": "text", "text": "?"}],
        }
    ]
    request = Request(chat, Sampling(max_tokens=1, logprobs=5), interventions=[Sage(See(alpha=0.5, shallow=8))])
    exact, *rounded = (
        Engine(load(CHECKPOINT, dtype=kind), self_check=False).generate([request])[0].choices[0].logprobs[0]
        for kind in (torch.float32, torch.float16, torch.bfloat16)
    )
    for rounded_token, tolerance in zip(rounded, (0.05, 0.4), strict=True):
        logprobs = {alternative.token_id: alternative.logprob for alternative in rounded_token.top}
        assert logprobs[exact.token_id] == pytest.approx(exact.logprob, abs=tolerance)


def test_a_mixed_batch_gives_each_row_what_it_gets_alone(make_engine: Any) -> None:
    family = "qwen2_vl"
    sages = [None, *(Sage(see) for see in SEES.values()), Sage(think=Think(gamma=0.4, threshold=0.01)), None]
    sages.append(Sage(See(alpha=0.4), Think(gamma=0.6, threshold=0.02)))
    requests = [
        Request(
            families.example_messages(family, 1 + i % 3, seed=i, text="What is this? " * (1 + i % 4)),
            Sampling(max_tokens=STEPS + i % 3, ignore_eos=True, logprobs=2),
            interventions=[sage],
            diagnose=Diagnose() if i % 3 == 0 else None,
        )
        for i, sage in enumerate(sages)
    ]
    engine = make_engine(family, slots=5)
    together = [result.choices[0] for result in engine.generate(requests)]
    alone = [engine.generate([request])[0].choices[0] for request in requests]
    for together_choice, alone_choice in zip(together, alone, strict=True):
        assert together_choice.token_ids == alone_choice.token_ids
        for a, b in zip(together_choice.logprobs, alone_choice.logprobs, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
        if alone_choice.applied is not None:
            for stage, report in alone_choice.applied["sage"].items():
                for name, value in (report or {}).items():
                    assert together_choice.applied["sage"][stage][name] == (
                        value if isinstance(value, str) else pytest.approx(value, abs=1e-4)
                    )


def test_several_answers_of_one_prompt_report_what_one_reports(make_engine: Any) -> None:
    chat = families.example_messages("qwen2_vl", 2)
    sage = Sage(See(alpha=0.5), Think(gamma=0.5, threshold=0.01))
    sampling = Sampling(max_tokens=STEPS, ignore_eos=True)
    single = make_engine("qwen2_vl").generate([Request(chat, sampling, interventions=[sage])])[0].choices[0]
    three = (
        make_engine("qwen2_vl").generate([Request(chat, sampling, interventions=[sage], n=3, baseline=True)])[0].choices
    )
    for choice in three:
        assert choice.token_ids == single.token_ids
        assert choice.applied["sage"]["think"]["divergence"] == pytest.approx(
            single.applied["sage"]["think"]["divergence"], rel=1e-4
        )
        assert choice.baseline.applied is None


@pytest.mark.parametrize(
    ("make", "param"),
    [
        (lambda: See(alpha=-0.1), "sage.see.alpha"),
        (lambda: See(alpha=float("nan")), "sage.see.alpha"),
        (lambda: See(reading="sideways"), "sage.see.reading"),
        (lambda: See(ceiling=2.0), "sage.see.ceiling"),
        (lambda: Think(gamma=1.1), "sage.think.gamma"),
        (lambda: Think(gamma=float("inf")), "sage.think.gamma"),
        (lambda: Think(quantile=float("nan")), "sage.think.quantile"),
        (lambda: Think(threshold=-1.0), "sage.think.threshold"),
    ],
)
def test_settings_out_of_range_are_refused(make: Callable[[], object], param: str) -> None:
    check_refused(make, param)


def test_impossible_requests_are_refused(make_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine("qwen2_vl")
    monkeypatch.setattr(engine.mllm, "checked", None)  # thresholds of a self-check, which other tests may have run
    text_only = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    for chat, sage, param in (
        (text_only, Sage(See()), "sage.see"),
        (families.example_messages("qwen2_vl", 1), Sage(See(shallow=99)), "sage.see.shallow"),
        (families.example_messages("qwen2_vl", 1), Sage(think=Think()), "sage.think.threshold"),
    ):
        with pytest.raises(RequestError) as refused:
            engine.submit(Request(chat, interventions=[sage]))
        assert refused.value.param == param
    assert steering.Sage is Sage
