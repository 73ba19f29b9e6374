"""The plugin's HTTP routes beside vLLM's own: what the server can do, and one answer.

They lie below /v1, which vLLM's `--api-key` guards.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import io
import json
import logging
import uuid
from argparse import Namespace
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from PIL import Image
from pydantic import ValidationError
from starlette.datastructures import State
from starlette.responses import Response
from vllm.engine.protocol import EngineClient
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

import vllm
from helmsight_vllm import CONTRACT, __version__
from helmsight_vllm.admission import PairAdmission
from helmsight_vllm.arrays import array_of, mean_of
from helmsight_vllm.body import AnswerBody, PromptBody, SamplingBody, TwinBody
from helmsight_vllm.noise import add_noise
from helmsight_vllm.plan import KEY, expanded
from helmsight_vllm.scores import prompt_scores, token_scores
from helmsight_vllm.vectors import UnknownVector, load_vector
from vllm import RequestOutput, SamplingParams

log = logging.getLogger(__name__)

FACTS, ANSWER = "/v1/helmsight/facts", "/v1/helmsight/answer"
LINES = "application/x-ndjson"
ENDED = ("stop", "length")
"""The ends of a whole answer, as vLLM names them."""
READ = ("attention", "state_position", "residual")
"""Fields of a body that only read."""


class Refused(Exception):
    """A body that cannot be answered; `param` is the path of the field."""

    def __init__(self, message: str, param: str | None, code: str = "invalid_value"):
        super().__init__(message)
        self.param, self.code = param, code

    def json(self) -> dict[str, Any]:
        return {"error": {"message": str(self), "param": self.param, "code": self.code}}


class Side(NamedTuple):
    """An answer as vLLM generates it."""

    inputs: Any
    params: SamplingParams
    number: str


class Prepared(NamedTuple):
    """An answer, its twin in a contrast, and the number of tokens that it begins with."""

    leader: Side
    twin: Side | None
    forced: int


class HelmsightRoutes:
    """vLLM's endpoint plugin: it attaches the routes, and gets the engine when that is there."""

    name = "helmsight"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        router = APIRouter()
        router.add_api_route(FACTS, _facts, methods=["GET"], include_in_schema=False)
        router.add_api_route(ANSWER, _answer, methods=["POST"], include_in_schema=False)
        app.include_router(router)

    async def init_state(self, engine_client: EngineClient | None, state: State, args: Namespace) -> None:
        assert engine_client is not None  # it generates, or vLLM would not have asked for this plugin
        by_rank = await engine_client.collective_rpc("helmsight_facts")
        common = [name for name in by_rank[0]["can"] if all(name in other["can"] for other in by_rank)]
        can, servers = [*common, "grammar", "prompt_logprobs"], getattr(args, "api_server_count", None) or 1
        state.helmsight = Answers(engine_client, can, by_rank[0]["groups"], servers)


def pair_places(config: Any, groups: int, servers: int) -> tuple[int, int]:
    """Return how many pairs one of an engine's API servers may admit at once, and how many tokens of the cache for them.

    One block of the cache is never used, and vLLM may keep a share of them free. Each group of layers takes its own.
    """
    cache, scheduler = config.cache_config, config.scheduler_config
    total = cache.num_gpu_blocks or 0
    blocks = (total - 1 - int(scheduler.watermark * total)) // groups // servers
    return scheduler.max_num_seqs // 2 // servers, blocks * cache.block_size


async def _facts(request: Request) -> Response:
    answers: Answers = request.app.state.helmsight
    return JSONResponse(answers.facts())


async def _answer(request: Request) -> Response:
    answers: Answers = request.app.state.helmsight
    try:
        body = AnswerBody.model_validate_json(await request.body())
        prepared = await answers.prepare(body)
        if prepared.twin is not None:
            answers.pair_tokens(prepared)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        refusal = Refused(first["msg"], ".".join(map(str, first["loc"])) or None)
        return JSONResponse(refusal.json(), 400)
    except Refused as error:
        return JSONResponse(error.json(), 400)
    return StreamingResponse(answers.lines(body, prepared), media_type=LINES)


class Answers:
    """Answers bodies on an engine.

    can: what its workers do. groups: the groups of layers with cache blocks of their own. servers: API servers of the engine.
    """

    def __init__(self, engine: EngineClient, can: list[str], groups: int, servers: int = 1):
        self.engine, self.can = engine, can
        self._config: Any = engine.vllm_config
        self.pairs = PairAdmission(*pair_places(self._config, groups, servers))
        self._discarding = set[asyncio.Task[None]]()

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
        self._check(body)
        number = uuid.uuid4().hex
        images = [_image(data, place) for place, data in enumerate(body.images)]
        inputs = await self._inputs(body.prompt, images, body, "prompt")
        params = sampling_of(body.sampling, body.seed, body.stream)
        # Rows that come from the prefix cache are not computed, so that nothing can be read of them.
        reads = (body.attention, body.steering, body.think, body.state_position)
        params.skip_reading_prefix_cache = any(asked is not None for asked in reads)
        plan = plan_of(body, body.prompt, number)
        twin = None
        if body.twin is not None:
            plan |= {"pair": number, "rule": body.twin.rule.model_dump()}
            twin = await self._twin(body, body.twin, images, number)
        params.extra_args = {KEY: plan}
        return Prepared(Side(inputs, params, number), twin, len(inputs["prompt_token_ids"]) - body.prompt.length)

    async def _twin(self, body: AnswerBody, asked: TwinBody, images: list[Image.Image], number: str) -> Side:
        """Return the other side of a contrast, which generates the same tokens without measuring anything."""
        prompt = asked.prompt or body.prompt
        inputs = await self._inputs(prompt, images, body, "twin.prompt")
        if asked.noise is not None:
            vision = getattr(self._config.model_config.hf_config, "vision_config", None)
            try:
                add_noise(inputs, asked.noise.step, asked.noise.seeds, getattr(vision, "temporal_patch_size", 1))
            except ValueError as error:
                raise Refused(str(error), "twin.noise") from None
        kept = {"max_tokens", "min_tokens", "stop", "ignore_eos"}
        params = sampling_of(SamplingBody(**body.sampling.model_dump(include=kept)), None, body.stream)
        chosen = {name: value for name, value in plan_of(body, prompt, f"{number}-twin").items() if name not in READ}
        params.extra_args = {KEY: chosen | {"pair": number, "leads": False}}
        return Side(inputs, params, f"{number}-twin")

    async def lines(self, body: AnswerBody, prepared: Prepared) -> AsyncIterator[bytes]:
        """Yield the lines of an answer. A client that leaves ends it: vLLM aborts what is no longer read."""
        if prepared.twin is None:
            async for line in self._lines(body, prepared):
                yield line
            return
        async with self.pairs.place(self.pair_tokens(prepared)):
            twin = asyncio.ensure_future(self._follow(prepared.twin))
            try:
                async for line in self._lines(body, prepared):
                    yield line
            finally:
                twin.cancel()

    async def _follow(self, side: Side) -> None:
        """Generate a twin's tokens to their end; one that fails ends its leader, which would wait for it forever."""
        reason = None
        try:
            async for output in self.engine.generate(side.inputs, side.params, side.number):
                reason = output.outputs[0].finish_reason
        except Exception:
            log.exception("the twin of an answer failed")
        if reason not in ENDED:
            await self.engine.abort(side.number.removesuffix("-twin"))

    def pair_tokens(self, prepared: Prepared) -> int:
        """Return how many tokens of the cache a pair needs at most, in whole blocks; raise Refused for one that never fits."""
        block = self._config.cache_config.block_size
        sides = [side for side in (prepared.leader, prepared.twin) if side is not None]
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
                if output.prompt_logprobs is not None:
                    ids = side.inputs["prompt_token_ids"]
                    scores = prompt_scores(output.prompt_logprobs, ids, body.sampling.prompt_logprobs)
                if new.token_ids:
                    line: dict[str, Any] = {"tokens": list(new.token_ids)}
                    if body.sampling.logprobs is not None:
                        line |= token_scores(new.token_ids, new.logprobs, body.sampling.logprobs)
                    yield _line(line)
            reason = None if output is None else output.outputs[0].finish_reason
            if reason not in ENDED:
                raise RuntimeError(f"The answer ended by {reason}.")
            taken = await self._taken(side.number, prepared.forced + count - 1 if body.fed is None else body.fed)
            if scores is not None:
                taken["prompt_logprobs"] = {name: array_of(values) for name, values in scores.items()}
            yield _line({"ended": {"reason": reason, "reused": reused, "taken": taken}})
        except Exception as error:
            log.exception("an answer failed")
            self._discard(side.number)
            yield _line(Refused(f"{type(error).__name__}: {error}", None, "engine_error").json())
        except (GeneratorExit, asyncio.CancelledError):  # the client has left
            self._discard(side.number)
            raise

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

    def _check(self, body: AnswerBody) -> None:
        """Raise Refused where the server cannot do what a body asks for, or the body contradicts itself."""
        model = self._config.model_config
        layers = model.get_total_num_hidden_layers()
        needed = {
            "attention": body.attention, "steer": body.steering, "states": body.state_position, "stream": body.residual,
            "think": body.think, "pairs": body.twin, "grammar": body.sampling.grammar,
        }  # fmt: skip
        for name, asked in needed.items():
            if asked is not None and name not in self.can:
                raise Refused(f"This server cannot do {name!r}.", name, "unsupported")
        if body.twin is not None and body.twin.mask is not None:
            raise Refused("This server cannot mask images.", "twin.mask", "unsupported")
        length = body.prompt.length
        if body.attention is not None:
            labels = expanded(body.attention.labels)
            if len(labels) != length:
                raise Refused(f"There are {len(labels)} labels for {length} tokens.", "attention.labels")
            if labels.max(initial=-1) >= model.get_head_size():
                raise Refused(f"There may be at most {model.get_head_size()} labels.", "attention.labels")
        if body.steering is not None:
            classes = expanded(body.prompt.classes)
            if (
                len(classes) != length
                or not 0 <= classes.min(initial=0) <= classes.max(initial=0) < body.steering.classes
            ):
                raise Refused(f"There must be a class below {body.steering.classes} for each token.", "prompt.classes")
            for place, vector in enumerate(body.steering.vectors):
                if max(vector.layers, default=0) >= layers:
                    raise Refused(f"The model has {layers} layers.", f"steering.vectors[{place}].layers")
                try:
                    load_vector(vector.name, vector.digest)
                except UnknownVector as error:
                    raise Refused(str(error), f"steering.vectors[{place}]", error.code) from None
        if body.think is not None and len(body.think.thresholds) != layers:
            raise Refused(f"The model has {layers} layers.", "think.thresholds")

    async def _inputs(
        self, prompt: PromptBody, images: list[Image.Image], body: AnswerBody, param: str
    ) -> Any:
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
        if hashlib.sha256(ids.tobytes()).hexdigest() != prompt.sha256:
            raise Refused(
                f"The prompt's tokens differ: vLLM makes {len(inputs['prompt_token_ids'])} of it, of which "
                f"{prompt.length} should have this hash.",
                f"{param}.sha256",
            )
        return inputs


def salt_of(body: AnswerBody) -> str | None:
    """Return the salt of a body's cached keys, which differ with all that is done to tokens; None where nothing is done."""
    done = body.model_dump(include={"salt", "steering", "think"}, exclude_none=True, exclude_defaults=True)
    if not done:
        return None
    classes = body.prompt.classes if body.steering is not None else []
    return hashlib.sha256(json.dumps([done, classes], sort_keys=True).encode()).hexdigest()


def plan_of(body: AnswerBody, prompt: PromptBody, number: str) -> dict[str, Any]:
    """Return the plan of an answer to a prompt, as `Plan.of` reads it."""
    about = {"number": number, "length": prompt.length, "classes": prompt.classes}
    return {**about, **body.model_dump(include={*READ, "steering", "think"}, exclude_none=True)}


def sampling_of(body: SamplingBody, seed: int | None, stream: bool) -> SamplingParams:
    """Return vLLM's parameters."""
    grammar = None if body.grammar is None else StructuredOutputsParams(grammar=lark_of(body.grammar))
    kind = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
    fields = body.model_dump(exclude={"grammar", "logit_bias"})
    try:
        return SamplingParams(
            **fields, logit_bias=body.logit_bias or None, seed=seed, structured_outputs=grammar, output_kind=kind,
            skip_special_tokens=True,
        )  # fmt: skip
    except ValueError as error:
        raise Refused(str(error), "sampling") from None


def lark_of(grammar: str) -> str:
    """Return a grammar of llguidance in its dialect of Lark, which is what vLLM passes on; raise Refused for others."""
    if not grammar.lstrip().startswith("{"):
        return grammar
    try:
        (only,) = json.loads(grammar)["grammars"]
        if only.get("lark_grammar") is not None:
            return str(only["lark_grammar"])
        return f"start: %json {json.dumps(only['json_schema'])}"
    except (KeyError, TypeError, ValueError) as error:
        raise Refused(f"This is no grammar of llguidance: {error!r}.", "sampling.grammar") from None


def _image(data: str, place: int) -> Image.Image:
    try:
        return Image.open(io.BytesIO(base64.b64decode(data, validate=True))).convert("RGB")
    except (binascii.Error, OSError, ValueError) as error:
        raise Refused(f"This is no image: {error}", f"images[{place}]") from None


def _line(content: dict[str, Any]) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode() + b"\n"
