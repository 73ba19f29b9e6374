"""Other families than the embedded model's: small ones with weights that are drawn, against our own engine."""

from __future__ import annotations

from pathlib import Path

import pytest

import steering
from served import asked
from served.conftest import connected
from served.models import FAMILIES, made
from served.serving import LAYERS, served, steered_steps
from steering import Inapplicable, RequestError, VectorStore
from tests.steering.parallel.asking import requests
from tests.steering.vllm.test_answers import more_requests


@pytest.mark.parametrize("mode", LAYERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_of_other_families(family: str, mode: str, tmp_path: Path, work: Path) -> None:
    folder = made(family, tmp_path / family)
    own = steering.Engine(steering.load(folder, device="cpu"), slots=8, threads=1)
    with served(folder, work, *LAYERS[mode]) as url, connected(own, folder, url) as client:
        listed = {}
        vector = VectorStore(folder / "vectors").get("modality-preference")
        for name, request in (requests(own.mllm) | more_requests(vector, min(own.mllm.stop_ids))).items():
            try:
                client.inspect(request)
            except Inapplicable:
                continue
            if name != "sampled":
                listed[name] = request
        assert {"steered", "read", "several vectors", "icd", "vcd", "think", "grammar"} <= listed.keys()
        if family == "llava":
            for name in ("generate", "all of sage but see"):
                with pytest.raises(RequestError, match="no patches") as refused:
                    client.generate([listed.pop(name)])
                assert refused.value.param == "sage.generate"
        with steered_steps(url, mode):
            pending = {name: client.submit(request) for name, request in listed.items()}
            found = {name: completion.result() for name, completion in pending.items()}
    assert not list(asked.faults(found, {name: own.generate([request])[0] for name, request in listed.items()}))
