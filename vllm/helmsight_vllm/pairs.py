"""Contrast pairs: two answers, one of which leads, generate the same tokens, which come of the contrast of their logits.

In a step in which both stand at the same token the leader's logits are contrasted with its twin's, and both get the leader's
token. One that is ahead of the other is held: its token is discarded, as that of an unfinished prefill is, and the scheduler
gives the step back (see `scheduler`), so that its last token is computed again. So pairs need not be scheduled together.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from helmsight_vllm.answer import Answer
from helmsight_vllm.runtime import Runtime


class Matched(NamedTuple):
    """A leader and its twin in a step, by their places in the batch."""

    leader: int
    twin: int
    answer: Answer


def contrasted(full: torch.Tensor, twin: torch.Tensor, weight: float, relu: bool, plausible: float) -> torch.Tensor:
    """Return full + weight * (full - twin), of the ReLU of the difference with `relu`; logits (vocabulary,), float32.

    Tokens less likely than `plausible` times the likeliest one, by `full`, become impossible, as masked ones stay.
    """
    difference = (full - twin).relu() if relu else full - twin
    mixed = full + weight * difference
    if plausible > 0:
        mixed = mixed.masked_fill(full < full.max() + math.log(plausible), -torch.inf)
    return mixed.masked_fill(full == -torch.inf, -torch.inf)


def match(runner: Any, runtime: Runtime) -> tuple[list[Matched], list[int]]:
    """Return the pairs whose sides stand at the same token, and the places of sides that have to wait for the other."""
    batch = runner.input_batch
    unready = runner.discard_request_mask.np
    sides: dict[str, list[tuple[int, int, Answer]]] = {}
    for place, request in enumerate(batch.req_ids[: batch.num_reqs]):
        answer = runtime.answers.get(request)
        if answer is not None and answer.plan.pair is not None and not unready[place]:
            tokens = answer.plan.offset + len(runner.requests[request].output_token_ids)
            sides.setdefault(answer.plan.pair, []).append((place, tokens, answer))
    matched, held = [], []
    for ready in sides.values():
        if len(ready) == 2 and ready[0][1] == ready[1][1]:
            (leader, _, answer), (twin, _, _) = sorted(ready, key=lambda side: not side[2].plan.leads)
            matched.append(Matched(leader, twin, answer))
        else:
            held += [place for place, _, _ in ready]
    return matched, held


def contrast_in(runner: Any, runtime: Runtime) -> None:
    """Extend a runner's sampling by contrasts."""
    plain, plain_bookkeeping, plain_scores = runner._sample, runner._bookkeeping_sync, runner._get_prompt_logprobs_dict
    kept: dict[int, torch.Generator] = {}
    late: dict[str, Any] = {}  # log-probabilities of prompts whose answers are held, by request

    def sample(logits: Any, spec_decode_metadata: Any) -> Any:
        if logits is not None:  # those of tensor-parallel ranks are None where the first one alone samples
            runtime.make_masks(logits)
        matched, held = match(runner, runtime)
        for leader, twin, answer in matched:
            with runtime.faults.of(answer):
                rule: Any = answer.plan.rule
                full = logits[leader].float()
                mixed = contrasted(full, logits[twin].float(), rule["weight"], rule["relu"], rule["plausible"])
                tokens = len(runner.requests[runner.input_batch.req_ids[leader]].output_token_ids)
                answer.changes.append((tokens, mixed.argmax() != full.argmax()))
                logits[leader] = mixed.to(logits.dtype)
        for place in held:
            runner.discard_request_mask.np[place] = True
        if runner.device.type == "cpu":
            # A discarded token must not have drawn. vLLM sets generators back, which those of CPUs cannot do.
            generators = runner.input_batch.generators
            unready = runner.discard_request_mask.np
            kept.update({place: generators.pop(place) for place in [*generators] if unready[place]})
        output = plain(logits, spec_decode_metadata)
        for leader, twin, _ in matched:
            output.sampled_token_ids[twin] = output.sampled_token_ids[leader]
        return output

    def bookkeeping(*args: Any, **kwargs: Any) -> Any:
        noted = plain_bookkeeping(*args, **kwargs)
        runner.input_batch.generators.update(kept)
        kept.clear()
        return noted

    def prompt_scores(*args: Any, **kwargs: Any) -> dict[str, Any]:
        # vLLM's engine ends where they come without a token: those of a held answer wait for its first one.
        found = {**late, **plain_scores(*args, **kwargs)}
        batch, unready = runner.input_batch, runner.discard_request_mask.np
        ready = {request for place, request in enumerate(batch.req_ids[: batch.num_reqs]) if not unready[place]}
        late.clear()
        late.update((one, found.pop(one)) for one in [*found] if one not in ready)
        for gone in [request for request in late if request not in runner.requests]:
            del late[gone]
        return found

    runner._sample, runner._bookkeeping_sync, runner._get_prompt_logprobs_dict = sample, bookkeeping, prompt_scores
