"""vLLM's engine in this process, with the plugin's worker and scheduler, behind the methods that `Answers` calls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helmsight_vllm.answers import Answers
from helmsight_vllm.body import AnswerBody
from helmsight_vllm.plugin import register
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.llm_engine import LLMEngine

SETTINGS = {
    "VLLM_PLUGINS": "helmsight", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}  # fmt: skip


class Engine:
    """An engine of an event loop, which steps while it has requests; all that come before a step share it."""

    def __init__(self, model: Path, **arguments: Any):
        register()
        defaults = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 16, "block_size": 32}
        chosen = EngineArgs(
            str(model),
            enforce_eager=True,
            distributed_executor_backend="uni",
            gpu_memory_utilization=0.1,
            limit_mm_per_prompt={"image": 2, "video": 0},
            disable_log_stats=True,
            **{**defaults, **arguments},
        )
        self.inner = LLMEngine.from_engine_args(chosen)
        self.vllm_config, self.renderer = self.inner.vllm_config, self.inner.renderer
        self._outputs: dict[str, asyncio.Queue[Any]] = {}

    @property
    def worker(self) -> Any:
        """The only worker."""
        return self.inner.model_executor.driver_worker.worker

    async def generate(self, inputs: Any, params: Any, number: str) -> AsyncIterator[Any]:
        self._outputs[number] = asyncio.Queue()
        self.inner.add_request(number, inputs, params)
        try:
            while True:
                output = await self._outputs[number].get()
                if isinstance(output, Exception):
                    raise output
                yield output
                if output.finished:
                    return
        finally:
            del self._outputs[number]
            self.inner.abort_request([number])

    async def abort(self, number: str) -> None:
        self.inner.abort_request([number])
        if number in self._outputs:
            end = SimpleNamespace(token_ids=[], logprobs=None, finish_reason="abort")
            output = SimpleNamespace(outputs=[end], num_cached_tokens=0, prompt_logprobs=None, finished=True)
            self._outputs[number].put_nowait(output)

    async def collective_rpc(self, name: str, args: Any = ()) -> list[Any]:
        return self.inner.collective_rpc(name, args=args)

    async def stepping(self) -> None:
        """Step until it is cancelled; what a step raises ends all answers, as vLLM's engine does."""
        while True:
            await asyncio.sleep(0.001)
            if self.inner.has_unfinished_requests():
                try:
                    for output in self.inner.step():
                        if output.request_id in self._outputs:
                            self._outputs[output.request_id].put_nowait(output)
                except Exception as error:
                    for queue in self._outputs.values():
                        queue.put_nowait(error)
                    raise

    def answer(self, bodies: dict[str, dict[str, Any]]) -> dict[str, list[Any]]:
        """Return the lines of answers, all of which begin together."""

        async def answering() -> dict[str, list[Any]]:
            (facts,) = await self.collective_rpc("helmsight_facts")
            served = Answers(self, [*facts["can"], "grammar", "prompt_logprobs"], facts["groups"])  # type: ignore[arg-type]
            asked = {name: AnswerBody.model_validate(body) for name, body in bodies.items()}
            prepared = {name: await served.prepare(body) for name, body in asked.items()}

            async def lines(name: str) -> list[Any]:
                return [json.loads(line) async for line in served.lines(asked[name], prepared[name])]

            steps = asyncio.ensure_future(self.stepping())
            try:
                return dict(zip(bodies, await asyncio.gather(*map(lines, bodies)), strict=True))
            finally:
                steps.cancel()

        return asyncio.run(asyncio.wait_for(answering(), 60))


@contextmanager
def running(model: Path, **arguments: Any) -> Iterator[Engine]:
    """Yield an engine, and end it."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SETTINGS.items():
            patch.setenv(name, value)
        engine = Engine(model, **arguments)
        try:
            yield engine
        finally:
            engine.inner.engine_core.shutdown()
            cleanup_dist_env_and_memory()
