"""The plugin's HTTP routes beside vLLM's own: what the server can do, and one answer.

They lie below /v1, which vLLM's `--api-key` guards.
"""

from __future__ import annotations

from argparse import Namespace

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import ValidationError
from starlette.datastructures import State
from starlette.responses import Response
from vllm.engine.protocol import EngineClient

from helmsight_vllm.answers import Answers
from helmsight_vllm.body import AnswerBody
from helmsight_vllm.guard import KeyGuard, guarded_key
from helmsight_vllm.inputs import Refused

FACTS, ANSWER, COUNTS = "/v1/helmsight/facts", "/v1/helmsight/answer", "/v1/helmsight/steps"
LINES = "application/x-ndjson"


class HelmsightRoutes:
    """vLLM's endpoint plugin: it attaches the routes, and gets the engine when that is there."""

    name = "helmsight"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        router = APIRouter()
        router.add_api_route(FACTS, _facts, methods=["GET"], include_in_schema=False)
        router.add_api_route(ANSWER, _answer, methods=["POST"], include_in_schema=False)
        router.add_api_route(COUNTS, _steps, methods=["GET"], include_in_schema=False)
        app.include_router(router)
        if (key := guarded_key()) is not None:
            app.add_middleware(KeyGuard, key=key)

    async def init_state(self, engine_client: EngineClient | None, state: State, args: Namespace) -> None:
        assert engine_client is not None  # it generates, or vLLM would not have asked for this plugin
        by_rank = await engine_client.collective_rpc("helmsight_facts")
        common = [name for name in by_rank[0]["can"] if all(name in other["can"] for other in by_rank)]
        can, servers = [*common, "grammar", "prompt_logprobs"], getattr(args, "api_server_count", None) or 1
        state.helmsight = Answers(engine_client, can, by_rank[0]["groups"], servers)


async def _facts(request: Request) -> Response:
    answers: Answers = request.app.state.helmsight
    return JSONResponse(answers.facts())


async def _steps(request: Request) -> Response:
    answers: Answers = request.app.state.helmsight
    return JSONResponse(await answers.steps())


async def _answer(request: Request) -> Response:
    answers: Answers = request.app.state.helmsight
    try:
        body = AnswerBody.model_validate_json(await request.body())
        prepared = await answers.prepare(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        refusal = Refused(first["msg"], ".".join(map(str, first["loc"])) or None)
        return JSONResponse(refusal.json(), 400)
    except Refused as error:
        return JSONResponse(error.json(), 400)
    return StreamingResponse(answers.lines(body, prepared), media_type=LINES)
