"""Log-probabilities of a prompt's tokens, in the form of vLLM's chats."""

from __future__ import annotations

import steering
from server.app import create_app
from server.settings import Settings
from tests.server.api.choices import refused
from tests.server.conftest import ask


def test_they_come_as_vllm_sends_them(engine: steering.Engine) -> None:
    client = create_app(Settings(), engine=engine).test_client()
    value = ask(client, "Why?", prompt_logprobs=2).json
    first, *tokens = value["prompt_logprobs"]
    assert first is None
    assert len(tokens) == value["usage"]["prompt_tokens"] - 1
    for token in tokens:
        assert 2 <= len(token) <= 3
        assert {scored["rank"] for scored in token.values()} >= {1, 2}
        assert all(set(scored) == {"logprob", "rank", "decoded_token"} for scored in token.values())
    assert "prompt_logprobs" not in ask(client, "Why?").json
    assert refused(ask(client, "Why?", prompt_logprobs=2, stream=True), 400)["param"] == "prompt_logprobs"
    assert refused(ask(client, "Why?", prompt_logprobs=21), 400)["param"] == "prompt_logprobs"
