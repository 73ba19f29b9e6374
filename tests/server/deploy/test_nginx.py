"""nginx as deploy/nginx.conf sets it up, in front of a server: streams at once, ids, bodies, a server that is not there."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path

import requests

from server.app import create_app
from server.settings import Settings
from tests.ports import own_port
from tests.server.conftest import user
from tests.server.deploy.conftest import NAME, PAGE, Front
from tests.server.deploy.test_files import needs
from tests.server.fakes import FakeEngine
from tests.waiting import PATIENCE

pytestmark = needs("nginx")
CHAT = {"messages": [user("hi")], "stream": True}


def test_a_stream_comes_piece_by_piece_with_the_id_it_was_asked_with(
    front: Front, serve_worker: Callable[..., int], tmp_path: Path
) -> None:
    heard = threading.Event()
    engine = FakeEngine("first", heard, " second")
    app = create_app(Settings(allow_host=(NAME,)), engine=engine)  # type: ignore[arg-type]
    url = front(serve_worker(app))
    head = {"Host": NAME, "X-Request-ID": "mine-1"}
    with requests.post(f"{url}/v1/chat/completions", json=CHAT, headers=head, stream=True, timeout=PATIENCE) as answer:
        assert (answer.status_code, answer.headers["X-Request-Id"]) == (200, "mine-1")
        pieces = answer.iter_content(None)
        text = b""
        while b"first" not in text:  # nothing more is there to come before it is heard
            text += next(pieces)
        heard.set()
        assert b" second" in b"".join(pieces)
    made = requests.get(f"{url}/health", headers={"Host": NAME, "X-Request-ID": "not well formed"}, timeout=PATIENCE)
    assert re.fullmatch(r"[0-9a-f]{32}", made.headers["X-Request-Id"]), "nginx's own"
    assert '"request_id":"mine-1"' in (tmp_path / "helmsight.log").read_text()


def test_what_nginx_says_itself_is_an_error_as_the_servers_are(front: Front) -> None:
    url = front(own_port())
    head = {"Host": NAME, "Content-Type": "application/json", "Origin": PAGE}
    down = requests.post(f"{url}/v1/chat/completions", json=CHAT, headers=head, timeout=PATIENCE)
    assert (down.status_code, down.headers["Retry-After"], down.json()["error"]["code"]) == (
        503,
        "2",
        "server_unreachable",
    )
    large = requests.post(f"{url}/v1/chat/completions", data=bytes(34 * 2**20), headers=head, timeout=PATIENCE)
    assert (large.status_code, large.json()["error"]["type"]) == (413, "invalid_request_error")
    assert [one.headers["Access-Control-Allow-Origin"] for one in (down, large)] == [PAGE, PAGE]
    asking = {**head, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    preflight = requests.options(f"{url}/v1/chat/completions", headers=asking, timeout=PATIENCE)
    assert (preflight.status_code, preflight.headers["Access-Control-Allow-Headers"]) == (204, "authorization")
    assert preflight.headers["Access-Control-Allow-Origin"] == PAGE
    assert (
        requests.options(url, headers={**asking, "Origin": "https://else.example"}, timeout=PATIENCE).status_code == 503
    )
    other = requests.post(
        f"{url}/v1/chat/completions", headers={**head, "Origin": "https://else.example"}, timeout=PATIENCE
    )
    assert "Access-Control-Allow-Origin" not in other.headers


def test_another_replica_answers_chats_alone(front: Front, serve_worker: Callable[..., int]) -> None:
    dead, well = FakeEngine(), FakeEngine("here")
    dead.healthy = False
    lost, left = (serve_worker(create_app(Settings(allow_host=(NAME,)), engine=one)) for one in (dead, well))  # type: ignore[arg-type]
    url = front(lost, left)
    body = {"messages": [user("hi")]}

    def statuses(path: str) -> set[int]:
        return {
            requests.post(url + path, json=body, headers={"Host": NAME}, timeout=PATIENCE).status_code for _ in range(4)
        }

    assert statuses("/v1/chat/completions") == {200}
    assert len(well.requests) == 4
    assert statuses("/v1/steering/validate") == {503, 200}
    assert {requests.get(f"{url}/ready", headers={"Host": NAME}, timeout=PATIENCE).status_code for _ in range(4)} == {
        200
    }
