"""A vLLM server as the client sees it: the contract over HTTP, with plain transformers behind it."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from flask import Flask, Response, request
from werkzeug.serving import BaseWSGIServer, WSGIRequestHandler, make_server

from tests.steering.vllm.computing import PlainAnswers, WrongBody

CAN = ("steer", "attention", "states", "stream", "pairs", "vcd", "generate", "think", "grammar", "prompt_logprobs")


class _Chunked(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"

    def log(self, type: str, message: str, *args: Any) -> None:
        pass


@dataclass
class FakeVllm:
    """A server that runs in threads of this process.

    answer: returns the messages of a body. asked: the bodies that came. pause: seconds before each message. broken: makes
    every look fail, of which there were `looks`. aborted: is released for each stream whose client has left.
    """

    answer: Callable[[dict[str, Any]], Iterator[dict[str, Any]]]
    facts: dict[str, Any]
    key: str | None = None
    pause: float = 0.0
    broken: bool = False
    asked: list[dict[str, Any]] = field(default_factory=list)
    aborted: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    port: int = 0
    looks: int = 0

    def __post_init__(self) -> None:
        app = Flask("fake-vllm")
        self._computing = threading.Lock()
        app.before_request(self._admit)
        app.get("/health")(self._health)
        app.get("/v1/helmsight/facts")(lambda: self.facts)
        app.post("/v1/helmsight/answer")(self._answer)
        self.server: BaseWSGIServer = make_server("127.0.0.1", self.port, app, threaded=True, request_handler=_Chunked)
        self.server.daemon_threads = True  # type: ignore[attr-defined]
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self._connections: list[Any] = []
        process = self.server.process_request

        def processed(connection: Any, address: Any) -> None:
            self._connections.append(connection)
            process(connection, address)

        self.server.process_request = processed  # type: ignore[method-assign]

    def start(self) -> FakeVllm:
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def stop(self) -> None:
        """End it as a killed process ends: its connections break."""
        self.server.shutdown()
        self.server.server_close()
        for connection in self._connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _admit(self) -> Any:
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            return {"error": {"message": "Unauthorized"}}, 401
        return None

    def _health(self) -> Any:
        self.looks += 1
        return ("", 503) if self.broken else ("", 200)

    def _answer(self) -> Any:
        body = request.get_json()
        self.asked.append(body)
        messages = self.answer(body)
        try:
            with self._computing:
                first = next(messages)
        except WrongBody as error:
            return {"error": {"message": str(error), "param": error.param, "code": "invalid_value"}}, 400
        return Response(self._lines(first, messages, body["stream"]), mimetype="application/x-ndjson")

    def _lines(self, first: dict[str, Any], messages: Iterator[dict[str, Any]], streams: bool) -> Iterator[str]:
        whole: dict[str, Any] = {}
        try:
            message: dict[str, Any] | None = first
            while message is not None:
                time.sleep(self.pause)
                if streams:
                    yield json.dumps(message) + "\n"
                else:
                    for name, value in message.items():
                        whole[name] = whole[name] + value if name in whole else value
                with self._computing:
                    message = next(messages, None)
            if whole:
                yield json.dumps(whole) + "\n"
        except GeneratorExit:
            self.aborted.release()
            raise


def facts_of(answers: PlainAnswers, slots: int = 4, can: tuple[str, ...] = CAN, length: int = 2048) -> dict[str, Any]:
    config = answers.model.config.text_config
    return {
        "contract": 1,
        "plugin": "0.0",
        "vllm": "0.0",
        "model": {
            "layers": config.num_hidden_layers,
            "hidden_size": config.hidden_size,
            "vocabulary": config.vocab_size,
            "dtype": "float32",
        },
        "device": "cpu",
        "max_model_len": length,
        "max_num_seqs": slots,
        "can": list(can),
    }
