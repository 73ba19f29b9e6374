"""The translation of the settings into Ray Serve's."""

from __future__ import annotations

from importlib import import_module

import pytest

pytest.importorskip("ray.serve")

from ray.serve import Application
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from server.process.worker import DRAIN_MARGIN
from server.replicas import application
from server.replicas.application import gpus_each, replicas, threads_each
from server.settings import Settings


def test_replicas_share_the_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(application, "processors", lambda: 8)
    assert threads_each(Settings(replicas=2)) == 4
    assert threads_each(Settings(replicas=2, max_replicas=3)) == 2
    assert threads_each(Settings(replicas=20)) == 1
    assert threads_each(Settings(replicas=2, threads=3)) == 3
    assert replicas(Settings(replicas=4), 1)["ray_actor_options"] == {"num_cpus": 2, "num_gpus": 1}


def test_replicas_have_a_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(application, "for_cpu_alone", lambda: False)
    for there in (True, False):
        monkeypatch.setattr(application, "sees_gpu", lambda there=there: there)
        found = [gpus_each(Settings(device=device)) for device in ("auto", "cuda", "cpu")]
        assert found == [int(there), 1, 0]  # of a cluster whose other machines have them, cuda says so


def test_a_replica_takes_what_its_own_queue_takes_and_gets_its_time_to_drain() -> None:
    settings = Settings(replicas=2, slots=4, max_waiting=8, graceful_timeout=7)
    options = replicas(settings, 0)
    assert options["max_ongoing_requests"] == settings.worker_threads
    assert options["graceful_shutdown_timeout_s"] == 7 + DRAIN_MARGIN
    assert (options["num_replicas"], "autoscaling_config" in options) == (2, False)
    router = RequestRouterConfig(**options["request_router_config"])
    assert router.get_request_router_class().__name__ == "PictureRouter"
    assert router.request_router_kwargs == {"slots": 4}


def test_more_replicas_come_with_the_requests_at_work() -> None:
    settings = Settings(replicas=2, max_replicas=5, slots=4, replica_added_after=3, replica_removed_after=9)
    options = replicas(settings, 0)
    assert "num_replicas" not in options
    with pytest.warns(DeprecationWarning, match="metrics_interval_s"):  # whose successors Ray Serve does not read yet
        scaling = AutoscalingConfig(**options["autoscaling_config"])
    assert (scaling.min_replicas, scaling.max_replicas, scaling.target_ongoing_requests) == (2, 5, 4)
    assert (scaling.upscale_delay_s, scaling.downscale_delay_s) == (3, 9)
    assert (scaling.look_back_period_s, scaling.metrics_interval_s) == (3, 1), "or 30 s would outvote the 3"
    asked = AutoscalingConfig(
        **replicas(Settings(replicas=1, max_replicas=2, replica_requests=1.5), 0)["autoscaling_config"]
    )
    assert (asked.target_ongoing_requests, asked.look_back_period_s, asked.metrics_interval_s) == (1.5, 30, 10)
    for said in (0, 20, 100):
        settings = Settings(replicas=1, max_replicas=2, replica_added_after=said)
        chosen = replicas(settings, 0)["autoscaling_config"]
        assert chosen["look_back_period_s"] == {0: 1, 20: 20, 100: 30}[said]
        assert chosen["metrics_interval_s"] < chosen["look_back_period_s"], "as Ray Serve asks for"


def test_a_cluster_finds_the_application_by_its_path() -> None:
    assert isinstance(import_module("deploy.ray").app, Application)
