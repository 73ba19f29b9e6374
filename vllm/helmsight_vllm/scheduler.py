"""vLLM's schedulers, which end answers that failed, and give a step back to one of a pair that had to wait for the other."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import RequestStatus

from helmsight_vllm.faults import FAILED
from helmsight_vllm.plan import plan_of


class PlainScheduler(Scheduler):
    """A scheduler that ends answers that failed in a step with an error, without their tokens of that step."""

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        failed = {request for request in getattr(model_runner_output, FAILED, ()) if request in self.requests}
        failed |= self._misled(failed)
        for request in failed:
            place = model_runner_output.req_id_to_index.get(request)
            if place is not None and model_runner_output.sampled_token_ids:
                model_runner_output.sampled_token_ids[place] = []
            model_runner_output.prompt_logprobs_dict.pop(request, None)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for ended in self.finish_requests(failed, RequestStatus.FINISHED_ERROR):
            output = EngineCoreOutput(ended.request_id, [], finish_reason=ended.get_finished_reason())
            outputs.setdefault(ended.client_index, EngineCoreOutputs()).outputs.append(output)
        return outputs

    def _misled(self, failed: Collection[str]) -> set[str]:
        """Take keys that may lack their steering out of the cache, and return the running requests that have used some."""
        changed = [request for request in failed if _changes_keys(self.requests[request])]
        blocks = {block for request in changed for block in self._blocks(request)}
        if not blocks:
            return set()
        self.kv_cache_manager.evict_blocks(blocks)
        return {
            request.request_id for request in self.running if not blocks.isdisjoint(self._blocks(request.request_id))
        }

    def _blocks(self, request: str) -> set[int]:
        null = self.kv_cache_manager.block_pool.null_block.block_id
        return {block for group in self.kv_cache_manager.get_block_ids(request) for block in group} - {null}


class AheadScheduler(PlainScheduler, AsyncScheduler):
    """The same, asynchronous."""


class PairScheduler(PlainScheduler):
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
    return "pair" in (plan_of(request) or {})


def _changes_keys(request: Any) -> bool:
    """Return True for an answer whose keys differ from a plain one's, and so lack something where it failed."""
    return not {"steering", "think"}.isdisjoint(plan_of(request) or {})
