"""Answers by way of vLLM servers are those of the engine in this process."""

from __future__ import annotations

import pytest

import steering
from steering import Inapplicable
from tests.steering.parallel.asking import differences, requests, said
from tests.steering.vllm.conftest import Connect, Serve

UNSERVED = {
    "two images, read": "diagnostics.flags",
    "read beside its baseline": "diagnostics.flags",
}


def test_every_answer_is_the_one_that_this_process_would_give(
    model: steering.MLLM, own: steering.Engine, serve: Serve, connect: Connect
) -> None:
    client = connect(serve())
    for name, request in requests(model).items():
        try:
            (result,) = client.generate([request])
        except Inapplicable as error:
            print(name, error.param, error)
            continue
        (expected,) = own.generate([request])
        print(name, differences(said(result), said(expected), name, tolerance=5e-4)[:6])
