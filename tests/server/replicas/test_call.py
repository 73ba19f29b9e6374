"""Requests on their way to a replica: what an application is told of them, and the picture that they are about."""

from __future__ import annotations

import json
import socket

from PIL import Image

from server.http.watcher import client_socket
from server.replicas.call import Call
from tests.server.conftest import data_uri, user


def chat(*content: object) -> Call:
    body = json.dumps({"messages": [{"role": "user", "content": list(content)}]}).encode()
    return Call("POST", "/v1/chat/completions", body=body)


def picture(colour: str) -> object:
    return {"type": "image_url", "image_url": {"url": data_uri(Image.new("RGB", (84, 84), colour))}}


def test_an_environment_says_what_the_request_said() -> None:
    ours, theirs = socket.socketpair()
    call = Call(
        "POST", "/a b/ü", b"x=1&y=%20", ((b"content-type", b"text/plain"), (b"x-a", b"1"), (b"x-a", b"2"), (b"x_a", b"no")),
        b"body", ("10.0.0.7", 5), ("0.0.0.0", 8000),
    )  # fmt: skip
    environ = call.environ(ours)
    said = {name: environ[name] for name in ("REQUEST_METHOD", "QUERY_STRING", "RAW_URI", "CONTENT_TYPE", "HTTP_X_A")}
    assert said == {
        "REQUEST_METHOD": "POST", "QUERY_STRING": "x=1&y=%20", "RAW_URI": "/a%20b/%C3%BC?x=1&y=%20",
        "CONTENT_TYPE": "text/plain", "HTTP_X_A": "1,2",
    }  # fmt: skip
    assert environ["PATH_INFO"].encode("latin1").decode() == "/a b/ü"  # PEP 3333
    assert environ["wsgi.input"].read() == b"body"
    assert (environ["REMOTE_ADDR"], environ["SERVER_PORT"]) == ("10.0.0.7", "8000")
    assert client_socket(environ) is ours
    ours.close()
    theirs.close()


def test_a_chat_is_about_its_first_picture() -> None:
    text = {"type": "text", "text": 'Is "url": "x" a field?'}
    red = chat(picture("red"), text).picture
    assert red is not None
    assert red == chat(text, picture("red"), picture("blue")).picture
    assert red != chat(picture("blue"), text).picture
    assert chat(text).picture is None
    assert Call("GET", "/v1/models").picture is None


def test_what_changes_something_is_not_asked_twice() -> None:
    assert chat(user("hi")).repeatable
    assert Call("GET", "/v1/steering/vectors").repeatable
    assert not Call("POST", "/v1/steering/vectors").repeatable
    assert not Call("DELETE", "/v1/steering/vectors/a").repeatable
