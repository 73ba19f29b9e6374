"""vLLM's scheduler, which gives a step back to an answer of a contrast pair that had to wait for the other."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from helmsight_vllm.plan import plan_in


class PairScheduler(Scheduler):
    """The scheduler of engines with contrast pairs."""

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        held = [
            request
            for identity in scheduler_output.num_scheduled_tokens
            if (request := self.requests.get(identity)) is not None
            and _is_paired(request)
            and not request.is_finished()
            and request.num_computed_tokens >= request.num_tokens
            and _discarded(model_runner_output, identity)
        ]
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for request in held:
            request.num_computed_tokens -= 1
        return outputs


def _discarded(output: Any, identity: str) -> bool:
    """Return True where a step brought no token of a request."""
    place = output.req_id_to_index.get(identity)
    return place is not None and bool(output.sampled_token_ids) and not output.sampled_token_ids[place]


def _is_paired(request: Any) -> bool:
    params = request.sampling_params
    return params is not None and "pair" in (plan_in(params.extra_args) or {})
