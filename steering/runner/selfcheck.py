"""The self-check at load: it compares the engine with the plain model, so that wrong answers are refused at the start."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle
from transformers.utils import logging as transformers_logging

from steering.accel.cuda_graphs import DecodeGraphs
from steering.decoder import attention
from steering.decoder.hooks import AttentionHook
from steering.errors import RequestError, UnsupportedModel
from steering.forwards import own_forwards
from steering.model.calibration import Calibration
from steering.model.mllm import MLLM
from steering.model.processing.pixels import picture
from steering.prompt.layout import Prompt, build_prompt
from steering.protocol.sequence import Sequence, Spec, State
from steering.protocol.slots import DecodeBatch, Pool, PrefillChunk, Slots
from steering.recorders.additions import AdditionSlots
from steering.recorders.attention import DECODED, NAME
from steering.recorders.spans import image_sums
from steering.runner.runner import Runner

log = logging.getLogger(__name__)

STEPS = 4
TOLERANCE = 1e-3
"""Largest difference of float32 logits relative to the largest logit, and of attention to an image."""
HALF_TOLERANCE = 5e-2
"""Largest difference in half precision of a layer, attention, or a step's logits, where the plain model's are not large."""
MARGIN = 2.0
"""Largest ratio of an error in half precision to the plain model's, whose rounding is as arbitrary.

Over eight prompts of the embedded model it was 0.83 (bfloat16) and 0.88 (float16), over two of them up to 1.4.
"""


@torch.inference_mode()
def check_model(mllm: MLLM, fast: bool = False) -> None:
    """Compare prefill and several decode steps of two ragged prompts with the plain model on eager attention.

    They run once as plain requests and once with attention that is read and changed. In half precision and in integers, both
    models are compared with the same model computed in float32, and the engine may be at most `MARGIN` times as far from it
    as the plain model is; the agreement of its tokens is logged. A quantized model computes in integers from here on. Where
    layers add something else to the residual stream than the updates that hooks get, `mllm.updates_add_up` becomes False;
    otherwise `mllm.checked` holds the divergence of these updates. With `fast`, weights stay as a CPU's backend needs them,
    and on a GPU decode steps are captured graphs. Raises UnsupportedModel, naming the first decoder layer that differs where
    there is one.
    """
    try:
        with mllm.stepping:
            prompts = checked_prompts(mllm)
            references = [_Reference.of(mllm, prompt) for prompt in prompts]
            mllm.settle(fast)
            if mllm.quantization is not None:
                references = [
                    reference.computed_anew(mllm, prompt) for reference, prompt in zip(references, prompts, strict=True)
                ]
            tokens = [reference.tokens for reference in references]
            ours, _ = _engine_logits(mllm, prompts, tokens, graphs=fast and mllm.device.type != "cpu")
            explicit, observed = _engine_logits(mllm, prompts, tokens, graphs=False, observed=True)
    except UnsupportedModel:
        raise
    except Exception as error:
        reason = (
            "its chat template or processor refused the check's prompt"
            if isinstance(error, RequestError)
            else "it failed"
        )
        raise UnsupportedModel(f"{mllm.name} cannot be served: {reason} in the self-check: {error!r}") from error
    for got in (ours, explicit):
        _compare_logits(mllm, prompts, references, got)
    if mllm.rounds:
        log.info("%s: %s", mllm.quantization or mllm.dtype, _agreement(references, ours))
    for reference, sums in zip(references, observed, strict=True):
        difference, plain = (
            float((got - reference.attention).abs().max()) for got in (sums, reference.plain_attention)
        )
        if not difference <= (max(HALF_TOLERANCE, MARGIN * plain) if mllm.rounds else TOLERANCE):
            raise UnsupportedModel(
                f"{mllm.name} cannot be served exactly: its attention to an image is read {difference:.1e} off."
            )


def _compare_logits(mllm: MLLM, prompts: list[Prompt], references: list[_Reference], ours: list[torch.Tensor]) -> None:
    """Raise UnsupportedModel where logits (steps, vocabulary) of the prompts differ from those of the references."""
    single = not mllm.rounds
    plain = torch.stack([_rms(_relative(reference.plain, reference.exact)) for reference in references])
    errors = [_relative(got, reference.exact) for got, reference in zip(ours, references, strict=True)]
    own = torch.stack([_rms(error) for error in errors])
    most = TOLERANCE if single else max(HALF_TOLERANCE, MARGIN * float(plain.max()))
    for prompt, error, rms in zip(prompts, errors, own, strict=True):
        difference = error.abs().amax(-1) if single else rms  # (steps,)
        wrong = ~(difference <= most)
        if bool(wrong.any()):
            step = int(wrong.nonzero()[0])
            where = f"decoding step {step}" if step else _first_difference(mllm, prompt)
            raise UnsupportedModel(
                f"{mllm.name} cannot be served exactly: its logits differ from the plain model's by "
                f"{float(difference[step]):.1e} of their range, first at {where}."
            )
    # Rounding may favour one step or one prompt; the mean over all of them characterises the model.
    whole, usual = (float(rms.square().mean().sqrt()) for rms in (own, plain))
    if not single and not whole <= MARGIN * usual:
        raise UnsupportedModel(
            f"{mllm.name} cannot be served exactly in {mllm.quantization or mllm.dtype}: its logits are {whole:.1e} of "
            f"their range from those of float32, the plain model's {usual:.1e}."
        )


def _relative(logits: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Return the differences (steps, vocabulary) of logits, relative to the largest exact one."""
    return (logits - exact) / exact.abs().max().clamp(min=1e-6)


def _rms(errors: torch.Tensor) -> torch.Tensor:
    """Return the root mean square (steps,) of errors (steps, vocabulary)."""
    return errors.square().mean(-1).sqrt()


def checked_prompts(mllm: MLLM) -> list[Prompt]:
    """Return two prompts of different lengths, with a picture each."""
    return [
        build_prompt(
            mllm,
            [{"role": "user", "content": [{"type": "image", "image": picture()}, {"type": "text", "text": text}]}],
        )
        for text in ("What is this?", "Describe the picture in a few words, then say what is missing.")
    ]


def _agreement(references: list[_Reference], ours: list[torch.Tensor]) -> str:
    """Describe the distance between logits (steps, vocabulary) of the prompts and those in float32."""
    exact, got = torch.cat([reference.exact for reference in references]), torch.cat(ours)
    same = int((exact.argmax(-1) == got.argmax(-1)).sum())
    apart = torch.nn.functional.kl_div(
        got.log_softmax(-1), exact.log_softmax(-1), reduction="batchmean", log_target=True
    )
    return (
        f"{same} of {len(got)} tokens are those of float32, whose distributions are {float(apart):.1e} nats (KL) away"
    )


@contextmanager
def plain(mllm: MLLM, implementation: str = "eager") -> Iterator[nn.Module]:
    """Let the model compute as transformers does, with a stock attention implementation in the language model."""
    mllm.model.set_attn_implementation({"text_config": implementation})
    try:
        with own_forwards():
            yield mllm.model
    finally:
        mllm.model.set_attn_implementation({"text_config": attention.NAME})
        if hasattr(mllm.model.model, "rope_deltas"):
            mllm.model.model.rope_deltas = None


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Let every module of a half-precision model compute in float32.

    Weights are converted while a module runs, one module at a time, so that the memory of a second model is not needed.
    """
    handles: list[RemovableHandle] = []

    def widen(module: nn.Module, args: Any, kwargs: Any) -> Any:
        for tensor in tensors_of[module]:
            originals[tensor] = tensor.data
            tensor.data = tensor.data.float()
        return tree_map(_widen, args), tree_map(_widen, kwargs)

    def restore(module: nn.Module, args: Any, output: Any) -> None:
        for tensor in tensors_of[module]:
            tensor.data = originals.pop(tensor)

    tensors_of: dict[nn.Module, list[torch.Tensor]] = {}
    originals: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        whole = isinstance(module, nn.MultiheadAttention)  # it reads the weights of its last layer by itself
        tensors = [_local_share(tensor) for tensor in (*module.parameters(whole), *module.buffers(whole))]
        if half := [tensor for tensor in tensors if tensor.dtype in (torch.float16, torch.bfloat16)]:
            tensors_of[module] = half
            handles.append(module.register_forward_pre_hook(widen, with_kwargs=True))
            handles.append(module.register_forward_hook(restore, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _local_share(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's share of a tensor: all of it unless ranks share the model; `to_local` would copy."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _widen(value: Any) -> Any:
    half = isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if half else value


class _Reference(NamedTuple):
    """The results of plain transformers for a prompt.

    tokens: (steps) greedy ones. plain, exact: (steps, vocabulary) logits in the model's dtype and in float32.
    plain_attention, attention: (layers,), of the prompt's last row to the image, mean over heads, likewise.
    """

    tokens: list[int]
    plain: torch.Tensor
    exact: torch.Tensor
    plain_attention: torch.Tensor
    attention: torch.Tensor

    @classmethod
    def of(cls, mllm: MLLM, prompt: Prompt) -> _Reference:
        with plain(mllm) as model:
            out = exact = _generate_plain(mllm, model, prompt)
            if mllm.dtype != torch.float32:
                with in_float32(model):
                    exact = _generate_plain(mllm, model, prompt, out.sequences[0])
        return cls(
            out.sequences[0, prompt.length :].tolist(),
            torch.cat(out.logits).float(),
            torch.cat(exact.logits).float(),
            _attention_to_image(mllm, prompt, out),
            _attention_to_image(mllm, prompt, exact),
        )

    def computed_anew(self, mllm: MLLM, prompt: Prompt) -> _Reference:
        """Return the reference with `plain` recomputed along its tokens, as the plain model now computes in integers."""
        ids = torch.cat([prompt.inputs["input_ids"][0], torch.tensor(self.tokens)]).to(mllm.device)
        with plain(mllm) as model:
            return self._replace(plain=torch.cat(_generate_plain(mllm, model, prompt, ids).logits).float())


def _attention_to_image(mllm: MLLM, prompt: Prompt, out: Any) -> torch.Tensor:
    """Return the attention (layers,) of a prompt's last row to the image, mean over heads."""
    last = torch.stack([layer[0, :, -1].float().mean(0).to(mllm.device) for layer in out.attentions[0]])
    last = mllm.ranks.mean(last)
    # With a sliding window, only the latest columns may be returned.
    columns = prompt.layout.image_columns.to(last.device) - (prompt.length - last.shape[1])
    return last[:, columns[columns >= 0]].sum(-1)


def _generate_plain(mllm: MLLM, model: Any, prompt: Prompt, forced: torch.Tensor | None = None) -> Any:
    """Run plain `generate()` for a few tokens, along the forced ones where given."""

    def force(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert forced is not None
        return torch.full_like(scores, -torch.inf).index_fill_(1, forced[ids.shape[1]], 0.0)

    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # a vision encoder's attention warns that it returns no weights
    try:
        return model.generate(
            **{name: value.to(mllm.device) for name, value in prompt.inputs.items()},
            max_new_tokens=STEPS,
            min_new_tokens=STEPS,
            do_sample=False,
            output_logits=True,
            output_attentions=True,
            return_dict_in_generate=True,
            logits_processor=[] if forced is None else [force],
        )
    finally:
        transformers_logging.set_verbosity(verbosity)


class _Explicit(AttentionHook):
    """Requests the weights of every row, and changes nothing. queries: all of a prefill."""

    def __init__(self, rows: int, queries: torch.Tensor | None, device: torch.device):
        self.asked = torch.ones(rows, 1, 1, 1, dtype=torch.bool, device=device)
        self.queries = queries


class _ExplicitSlots(Slots):
    """Runs every pass with explicit weights, as an intervention may."""

    always: ClassVar[bool] = True

    def prefill(self, chunk: PrefillChunk) -> _Explicit:
        queries = torch.arange(chunk.width, device=self.pool.device).expand(len(chunk.sequences), -1)
        return _Explicit(len(chunk.sequences), queries, self.pool.device)

    def decode(self, batch: DecodeBatch) -> _Explicit:
        return _Explicit(len(batch.sequences), None, self.pool.device)


def _engine_logits(
    mllm: MLLM, prompts: list[Prompt], tokens: list[list[int]], graphs: bool, observed: bool = False
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the engine's logits (steps, vocabulary) for each prompt, in one batch with the reference's tokens forced.

    With `observed`, also the attention (layers,) of each prompt's last row to its image.
    """
    length = max(prompt.length for prompt in prompts) + STEPS
    slots = len(prompts) + 1  # as in production, where most steps leave some slots unused
    runner = Runner(mllm, slots, length, max_images=1, backend=DecodeGraphs(mllm) if graphs else None)
    added = AdditionSlots("additions", Pool(mllm, slots, length, 1))
    if observed:
        runner.interventions |= {"selfcheck": _ExplicitSlots("selfcheck", added.pool), added.name: added}
    sequences = [checked_sequence(prompt, slot, observed) for slot, prompt in enumerate(prompts)]
    logits = []
    for sequence in sequences:
        first = runner.prefill([sequence], budget=sequence.prompt.length // 2 + 1)
        if first is None:
            first = runner.prefill([sequence], budget=sequence.prompt.length)
        assert first is not None
        runner.next_tokens([sequence], first)
        logits.append([first[0]])
    for step in range(STEPS - 1):
        for sequence, forced in zip(sequences, tokens, strict=True):
            sequence.tokens.append(forced[step])
            runner.token[sequence.slot] = forced[step]
        for row, got in enumerate(runner.decode_logits(sequences)):
            logits[row].append(got)
    if observed and added.exact:
        mllm.checked = Calibration(mllm.fingerprint).with_divergence(added.divergence(), len(prompts))
    elif observed:
        mllm.updates_add_up = False
        log.warning("%s: its layers add something else than attention's and the FFN's updates", mllm.name)
    sums = [image_sums(sequence.captured[NAME].last_sums).sum(-1) for sequence in sequences] if observed else []
    return [torch.stack(rows) for rows in logits], sums


def checked_sequence(prompt: Prompt, slot: int, observed: bool = False) -> Sequence:
    """Return a running sequence of a prompt, whose attention is captured where `observed`."""
    spec = Spec(prompt, max_tokens=STEPS, captured=frozenset(DECODED if observed else ()))
    return Sequence(spec, slot=slot, state=State.RUNNING)


def _first_difference(mllm: MLLM, prompt: Prompt) -> str:
    """Name the first decoder layer whose output differs in prefill."""
    with plain(mllm) as model, _record_layers(mllm) as expected:
        model(**{name: value.to(mllm.device) for name, value in prompt.inputs.items()}, use_cache=False)
    runner = Runner(mllm, 1, prompt.length + 1, max_images=1)
    with _record_layers(mllm) as got:
        runner.prefill([checked_sequence(prompt, 0)], budget=prompt.length)
    tolerance = HALF_TOLERANCE if mllm.rounds else TOLERANCE
    for layer, (plainly, ours) in enumerate(zip(expected, got, strict=True)):
        difference = (plainly.float() - ours.float()).norm(dim=-1) / plainly.float().norm(dim=-1).clamp(
            min=1e-6
        )  # (1, n)
        if not bool((difference <= tolerance).all()):
            return f"decoder layer {layer} ({type(mllm.layers[layer]).__name__})"
    return "the prompt's last logits"


@contextmanager
def _record_layers(mllm: MLLM) -> Iterator[list[torch.Tensor]]:
    """Yield the outputs of all decoder layers, in order of their calls."""
    outputs: list[torch.Tensor] = []
    handles = [
        layer.register_forward_hook(lambda module, args, output: outputs.append(output)) for layer in mllm.layers
    ]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()
