"""The progress of loading, as waiting clients see it."""

from __future__ import annotations

import threading

from transformers.utils import logging

import steering
from server.app import create_app
from server.engine.progress import LoadProgress, weights_told
from server.engine.runtime import Runtime, Serving, load
from server.settings import Settings
from tests.server.fakes import FakeEngine
from tests.waiting import PATIENCE


def test_what_is_read_is_told_bar_by_bar() -> None:
    told: list[tuple[str, float | None]] = []
    before = logging.set_tqdm_hook(None)
    try:
        with weights_told(lambda stage, share: told.append((stage, share)), "reading"):
            assert list(logging.tqdm(["a", "b", "c", "d"], desc="Loading weights")) == ["a", "b", "c", "d"]
            with logging.tqdm(range(2)) as bar:
                assert list(bar) == [0, 1]
            bar = logging.tqdm(total=3)  # of no known items: left alone
            bar.update(1)
            bar.close()
        assert told == [
            ("Loading weights", 0.0), ("Loading weights", 0.25), ("Loading weights", 0.5), ("Loading weights", 0.75),
            ("reading", 0.0), ("reading", 0.5),
        ]  # fmt: skip
        list(logging.tqdm(["a"]))
        assert len(told) == 6  # outside of the block nobody hears
    finally:
        logging.set_tqdm_hook(before)


def test_a_model_is_loaded_in_stages() -> None:
    told: list[tuple[str, float | None]] = []
    serving = load(Settings(vectors=(), slots=1, journal="off"), lambda stage, share: told.append((stage, share)))  # type: ignore[arg-type]
    serving.engine.stop()
    stages = list(dict.fromkeys(stage for stage, _ in told))
    assert stages == ["importing", "Loading weights", "comparing it with the plain model", "measuring its magnitudes"]
    shares = [share for stage, share in told if stage == "Loading weights" and share is not None]
    assert shares == sorted(shares)
    assert shares[-1] > 0.9
    assert serving.capabilities.about["family"] == "qwen2_vl"


def test_ready_says_how_far_loading_is() -> None:
    loaded = threading.Event()

    def loader(settings: Settings) -> Serving:
        assert loaded.wait(PATIENCE)
        return Serving(FakeEngine(), steering.VectorStore())  # type: ignore[arg-type]

    runtime = Runtime(Settings(), loader=loader)
    client = create_app(Settings(), runtime=runtime).test_client()
    runtime.start()
    runtime.progress.tell("reading", 0.5)
    response = client.get("/ready")
    assert response.status_code == 503
    progress = response.json["progress"]  # type: ignore[index]
    assert (progress["stage"], progress["share"]) == ("reading", 0.5)
    assert 0 <= progress["seconds"] < 10
    loaded.set()
    while runtime.state == "loading":
        pass
    assert "progress" not in client.get("/ready").json  # type: ignore[operator]


def test_time_runs_from_the_beginning() -> None:
    assert LoadProgress().as_json() == {"stage": "starting", "share": None, "seconds": 0.0}
