"""Messages between two processes: large ones keep no short one waiting, and arrive whole."""

from __future__ import annotations

import socket
import threading
from typing import Any

import torch

from steering.child.link import PIECE, Link
from tests.waiting import PATIENCE


def test_a_short_message_overtakes_large_ones() -> None:
    theirs, ours = (Link(end, shares) for end, shares in zip(socket.socketpair(), (False, True), strict=True))
    large = [torch.arange(40 * PIECE, dtype=torch.uint8) + number for number in range(2)]
    senders = [
        threading.Thread(target=theirs.send, args=([["large", number, value]],)) for number, value in enumerate(large)
    ]
    for sender in senders:
        sender.start()  # it blocks, as nobody reads
    short = threading.Thread(target=theirs.send, args=([["short"]],))
    short.start()
    received: list[Any] = [ours.receive()[0] for _ in range(3)]
    assert received[0] == ["short"]
    for name, number, value in received[1:]:
        assert name == "large"
        assert torch.equal(value, large[number])
    for sender in senders:
        sender.join(PATIENCE)
    theirs.close()
    ours.close()
