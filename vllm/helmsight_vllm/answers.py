"""Answers to bodies on vLLM's engine, line by line, with the other sides of contrasts."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import uuid
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import numpy as np
from PIL import Image
from vllm.engine.protocol import EngineClient
from vllm.inputs import TokensPrompt
from vllm.v1.engine.exceptions import EngineDeadError

import vllm
from helmsight_vllm import CONTRACT, __version__
from helmsight_vllm.admission import PairAdmission
from helmsight_vllm.arrays import array_of, mean_of
from helmsight_vllm.body import AnswerBody, MaskBody, PromptBody, SamplingBody, TwinBody
from helmsight_vllm.checks import check
from helmsight_vllm.inputs import READ, Prepared, Refused, Side, image_of, plan_of, salt_of, sampling_of
from helmsight_vllm.masks import add_masks, maskable
from helmsight_vllm.noise import add_noise
from helmsight_vllm.plan import KEY
from helmsight_vllm.scores import prompt_scores, token_scores
from vllm import RequestOutput

log = logging.getLogger(__name__)

ENDED = ("stop", "length")
"""The ends of a whole answer, as vLLM names them."""
POLL = 0.01
"""Seconds between two looks for a mask."""
ALONE = 30.0
"""Seconds that a leader may run without its twin, which ends by the same token."""


def pair_places(config: Any, groups: int, servers: int) -> tuple[int, int]:
    """Return how many pairs one of an engine's API servers may admit at once, and how many tokens of the cache for them.

    One block of the cache is never used, and vLLM may keep a share of them free. Each group of layers takes its own.
    """
    cache, scheduler = config.cache_config, config.scheduler_config
    total = cache.num_gpu_blocks or 0
    blocks = (total - 1 - int(scheduler.watermark * total)) // groups // servers
    return scheduler.max_num_seqs // 2 // servers, blocks * cache.block_size


class Answers:
    """Answers bodies on an engine.

    can: what its workers do. groups: the groups of layers with cache blocks of their own. servers: the engine's API servers.
    """

    def __init__(self, engine: EngineClient, can: list[str], groups: int, servers: int = 1):
        self.engine, self.can = engine, can
        self._config: Any = engine.vllm_config
        self.pairs = PairAdmission(*pair_places(self._config, groups, servers))
        self._discarding = set[asyncio.Task[None]]()

    async def steps(self) -> dict[str, int]:
        """Return the first worker's counts of steps and answers, and the number of pairs that have a place."""
        by_rank = await self.engine.collective_rpc("helmsight_steps")
        return {**by_rank[0], "pairs": self.pairs.admitted}

    def facts(self) -> dict[str, Any]:
        """Return the facts of the contract."""
        config, model = self._config, self._config.model_config
        return {
            "contract": CONTRACT,
            "plugin": __version__,
            "vllm": vllm.__version__,
            "model": {
                "layers": model.get_total_num_hidden_layers(),
                "hidden_size": model.get_hidden_size(),
                "vocabulary": model.get_vocab_size(),
                "dtype": str(model.dtype).removeprefix("torch."),
            },
            "device": config.device_config.device_type,
            "max_model_len": model.max_model_len,
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "can": self.can,
        }

    async def prepare(self, body: AnswerBody) -> Prepared:
        """Return what an answer needs of vLLM; raise Refused."""
        check(body, self.can, self._config.model_config)
        number = uuid.uuid4().hex
        # Pictures take long. Meanwhile the event loop has other answers to pass on.
        images = await asyncio.gather(
            *(asyncio.to_thread(image_of, data, place) for place, data in enumerate(body.images))
        )
        inputs = await self._inputs(body.prompt, images, body, "prompt")
        params = sampling_of(body.sampling, body.seed, body.stream)
        # Rows that come from the prefix cache are not computed, so that nothing can be read of them.
        reads = (body.attention, body.steering, body.think, body.state_position)
        masks = body.twin is not None and body.twin.mask is not None
        if masks or any(asked is not None for asked in reads):  # else vLLM knows, such as where it scores a prompt
            params.skip_reading_prefix_cache = True
        plan = plan_of(body, body.prompt, number)
        twin = None
        if body.twin is not None:
            plan |= {"pair": number, "rule": body.twin.rule.model_dump()}
            if body.twin.mask is None:
                twin = await self._twin(body, body.twin, images, number)
            else:
                plan["mask"] = self._mask_of(body.twin.mask, inputs, body)
        params.extra_args = {KEY: plan}
        leader = Side(inputs, params, number)
        prepared = Prepared(leader, twin, images, len(inputs["prompt_token_ids"]) - body.prompt.length)
        if body.twin is not None:
            self._pair_tokens(prepared)
        return prepared

    async def _twin(self, body: AnswerBody, asked: TwinBody, images: list[Image.Image], number: str) -> Side:
        """Return the other side of a contrast, which generates the same tokens without measuring anything."""
        prompt = asked.prompt or body.prompt
        inputs = await self._inputs(prompt, images, body, "twin.prompt")
        if asked.noise is not None:
            vision = getattr(self._config.model_config.hf_config, "vision_config", None)
            try:
                frames = getattr(vision, "temporal_patch_size", 1)
                await asyncio.to_thread(add_noise, inputs, asked.noise.step, asked.noise.seeds, frames)
            except ValueError as error:
                raise Refused(str(error), "twin.noise") from None
        return self._side(body, prompt, inputs, number)

    def _side(
        self, body: AnswerBody, prompt: PromptBody, inputs: Any, number: str, offset: int = 0, most: int = 0
    ) -> Side:
        """Return a twin that begins behind `offset` tokens of the answer, and generates `most`, 0 for as many as that."""
        kept = {name: getattr(body.sampling, name) for name in ("max_tokens", "min_tokens", "stop", "ignore_eos")}
        kept |= {
            "max_tokens": most or body.sampling.max_tokens,
            "min_tokens": max(0, body.sampling.min_tokens - offset),
        }
        kept["min_tokens"] = min(kept["min_tokens"], kept["max_tokens"])
        params = sampling_of(SamplingBody(**kept), None, False)
        chosen = {name: value for name, value in plan_of(body, prompt, f"{number}-twin").items() if name not in READ}
        params.extra_args = {KEY: chosen | {"pair": number, "leads": False, "offset": offset}}
        return Side(inputs, params, f"{number}-twin-{offset}")

    def _mask_of(self, mask: MaskBody, inputs: Any, body: AnswerBody) -> dict[str, Any]:
        """Return the plan of masks; raise Refused where pictures cannot be masked or tokens are forced."""
        if len(inputs["prompt_token_ids"]) > body.prompt.length:
            raise Refused("There can be no mask before forced tokens.", "twin.mask", "unsupported")
        if not (mask.images and all(mask.images) and maskable(inputs, [len(columns) for columns in mask.images])):
            raise Refused("These pictures' tokens are no patches of their pixel values.", "twin.mask", "unsupported")
        columns = [column for image in mask.images for column in image]
        if (
            max(columns) >= body.prompt.length
            or max(mask.layers) >= self._config.model_config.get_total_num_hidden_layers()
        ):
            raise Refused("There are columns or layers that the model does not have.", "twin.mask")
        return mask.model_dump()

    async def lines(self, body: AnswerBody, prepared: Prepared) -> AsyncIterator[bytes]:
        """Yield the lines of an answer. A client that leaves ends it: vLLM aborts what is no longer read."""
        if body.twin is None:
            async for line in self._lines(body, prepared):
                yield line
            return
        async with self.pairs.place(self._pair_tokens(prepared)):
            twin = asyncio.ensure_future(self._lead_twin(body, prepared))
            try:
                async for line in self._lines(body, prepared):
                    yield line
            finally:
                twin.cancel()

    async def _lead_twin(self, body: AnswerBody, prepared: Prepared) -> None:
        """Generate a twin's tokens to their end, and end a leader that then goes on, which would wait for more forever."""
        reason = None
        try:
            reason = await self._follow(body, prepared)
        except Exception:
            log.exception("the twin of an answer failed")
        if reason in ENDED:
            await asyncio.sleep(ALONE)
        while True:  # the leader's end cancels this; one that the engine does not know yet cannot be aborted
            await self.engine.abort(prepared.leader.number)
            await asyncio.sleep(ALONE)

    async def _follow(self, body: AnswerBody, prepared: Prepared) -> str | None:
        """Generate the twin, or one after another with pictures masked anew, and return why it ended."""
        if prepared.twin is not None:
            return (await self._last(prepared.twin)).finish_reason
        asked: Any = body.twin
        sizes, tokens = [len(columns) for columns in asked.mask.images], list[int]()
        while True:
            patches = await self._mask(prepared.leader.number, len(tokens))
            prompt = body.prompt.model_copy(update={"ids": [*body.prompt.ids, *tokens]})
            inputs = await self._inputs(prompt, prepared.images, body, "twin.prompt")
            await asyncio.to_thread(add_masks, inputs, patches, sizes)
            room = body.sampling.max_tokens - len(tokens)
            most = min(asked.mask.refresh or room, room)
            end = await self._last(self._side(body, prompt, inputs, prepared.leader.number, len(tokens), most))
            tokens += end.token_ids
            if end.finish_reason != "length" or len(tokens) >= body.sampling.max_tokens:
                return end.finish_reason

    async def _last(self, side: Side) -> Any:
        """Generate a side to its end, and return that."""
        last = None
        async for output in self.engine.generate(side.inputs, side.params, side.number):
            last = output.outputs[0]
        if last is None:
            raise RuntimeError("The engine ended an answer without a word.")
        return last

    async def _mask(self, number: str, tokens: int) -> list[list[int]]:
        """Wait for the mask of an answer from a token on."""
        while True:
            made = await self.engine.collective_rpc("helmsight_mask", args=(number, tokens))
            if made[0] is not None:
                return made[0]
            await asyncio.sleep(POLL)

    def _pair_tokens(self, prepared: Prepared) -> int:
        """Return the tokens of the cache that a pair needs at most, in whole blocks; raise Refused where it never fits."""
        block = self._config.cache_config.block_size
        sides = (prepared.leader, prepared.twin or prepared.leader)
        needed = sum(
            -(-(len(side.inputs["prompt_token_ids"]) + side.params.max_tokens) // block) * block for side in sides
        )
        if needed > self.pairs.most:
            raise Refused(f"The pair needs {needed} tokens of the cache, which has {self.pairs.most}.", "twin")
        return needed

    async def _lines(self, body: AnswerBody, prepared: Prepared) -> AsyncIterator[bytes]:
        side, count, reused = prepared.leader, 0, 0
        scores: dict[str, Any] | None = None
        output: RequestOutput | None = None
        try:
            async for output in self.engine.generate(side.inputs, side.params, side.number):
                (new,) = output.outputs
                count += len(new.token_ids)
                reused = output.num_cached_tokens or reused
                if output.prompt_logprobs:  # all of them come with the first output, and empty lists with later ones
                    ids = side.inputs["prompt_token_ids"]
                    scores = prompt_scores(output.prompt_logprobs, ids, body.sampling.prompt_logprobs)
                if new.token_ids:
                    line: dict[str, Any] = {"tokens": list(new.token_ids)}
                    if body.sampling.logprobs is not None:
                        line |= token_scores(new.token_ids, new.logprobs, body.sampling.logprobs)
                    yield _line(line)
            reason = None if output is None else output.outputs[0].finish_reason
            if reason not in ENDED:
                raise RuntimeError(await self._fault(side.number) or f"The answer ended by {reason}.")
            taken = await self._taken(side.number, prepared.forced + count - 1 if body.fed is None else body.fed)
            if scores is not None:
                taken["prompt_logprobs"] = {name: array_of(values) for name, values in scores.items()}
            yield _line({"ended": {"reason": reason, "reused": reused, "taken": taken}})
        except EngineDeadError:
            yield _line(Refused("vLLM's engine has ended.", None, "engine_dead").json())
        except Exception as error:
            log.exception("an answer failed")
            self._discard(side.number)
            yield _line(Refused(f"{type(error).__name__}: {error}", None, "engine_error").json())
        except (GeneratorExit, asyncio.CancelledError):  # the client has left
            self._discard(side.number)
            raise

    async def _fault(self, number: str) -> str | None:
        """Return the error by which an answer has failed on a worker; None where it has not."""
        errors = await self.engine.collective_rpc("helmsight_fault", args=(number,))
        return next((f"The plugin failed: {error}" for error in errors if error), None)

    def _discard(self, number: str) -> None:
        """Let the workers forget what they have measured of an answer that nobody reads."""

        async def discard() -> None:
            with suppress(Exception):
                await self.engine.collective_rpc("helmsight_take", args=(number, 0))

        task = asyncio.ensure_future(discard())
        self._discarding.add(task)
        task.add_done_callback(self._discarding.discard)

    async def _taken(self, number: str, fed: int) -> dict[str, Any]:
        """Return the measurements of an answer: of attention the mean over ranks, each of which has its own heads."""
        by_rank = [taken for taken in await self.engine.collective_rpc("helmsight_take", args=(number, fed)) if taken]
        if not by_rank:
            return {}
        taken: dict[str, Any] = by_rank[0]
        if "attention" in taken:
            attention = {name: mean_of([other["attention"][name] for other in by_rank]) for name in taken["attention"]}
            taken = {**taken, "attention": attention}
        return taken

    async def _inputs(self, prompt: PromptBody, images: list[Image.Image], body: AnswerBody, param: str) -> Any:
        """Return vLLM's inputs of a prompt, whose images are expanded; raise Refused where its tokens are others.

        Processed pictures are kept here, but sent to the engine each time: its own copy of the cache must see prompts in the
        order in which they are rendered, and a pair may wait for its place, or an answer be given up before it begins.
        """
        given = TokensPrompt(prompt_token_ids=prompt.ids)
        if (salt := salt_of(body)) is not None:
            given["cache_salt"] = salt
        if images:
            given["multi_modal_data"] = {"image": images}
        if body.size is not None:
            given["mm_processor_kwargs"] = {"size": body.size}
        try:
            (inputs,) = await self.engine.renderer.render_cmpl_async([given], skip_mm_cache=True)
        except ValueError as error:
            raise Refused(str(error), param) from None
        ids = np.array(inputs["prompt_token_ids"][: prompt.length], "<i4")
        if len(ids) != prompt.length or hashlib.sha256(ids.tobytes()).hexdigest() != prompt.sha256:
            raise Refused(
                f"The prompt's tokens differ: vLLM makes {len(inputs['prompt_token_ids'])} of it, of which "
                f"{prompt.length} should have this hash.",
                f"{param}.sha256",
            )
        return inputs


def _line(content: dict[str, Any]) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode() + b"\n"
