"""The application as Ray Serve runs it: a front and the replicas behind it, configured by Helmsight's own settings."""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve import Application

from server.engine.resources import processors
from server.process.preflight import for_cpu_alone, sees_gpu
from server.process.replica_checks import check, most_replicas
from server.process.worker import DRAIN_MARGIN, QUEUED
from server.replicas.front import Front
from server.replicas.replica import Replica
from server.settings import Settings

NAME = "helmsight"
ROUTER = "server.replicas.router:PictureRouter"
QUIET = {"enable_access_log": False, "log_level": "WARNING"}
"""Options that silence Ray Serve's own logs, since ours have a line for each request."""
LOOKS = {"health_check_period_s": 2.0, "health_check_timeout_s": 30.0}
TRIES = 1
"""Starts of a first replica; a model that fails to load would fail again."""
LOOK_BACK, REPORTS = 30.0, 3
"""Longest averaging window of the load in seconds (Ray Serve's default), and the reports within it."""
FRONT_REQUESTS = 10_000
"""Most requests in the front at once, which only waits for them."""


def threads_each(settings: Settings) -> int:
    """Return the CPU threads of each replica's engine: the configured ones, or a share of this machine's."""
    return settings.threads or max(1, processors() // most_replicas(settings))


def gpus_each(settings: Settings) -> int:
    """Return the GPUs of each replica: one, unless the settings or this machine require the CPU."""
    if settings.device == "auto":
        return int(sees_gpu() and not for_cpu_alone())
    return int(settings.device == "cuda")


def replicas(settings: Settings, gpus: int) -> dict[str, Any]:
    """Return Ray Serve's options for the replicas."""
    threads, least = threads_each(settings), settings.replicas or 1
    drained = settings.graceful_timeout + DRAIN_MARGIN
    return {
        "name": "Replica",
        "max_ongoing_requests": settings.worker_threads,
        "max_queued_requests": QUEUED,
        "graceful_shutdown_timeout_s": float(drained),
        "graceful_shutdown_wait_loop_s": 0.25,
        "ray_actor_options": {"num_cpus": threads, "num_gpus": gpus},
        "request_router_config": {
            "request_router_class": ROUTER, "request_router_kwargs": {"slots": settings.slots},
        },
        "logging_config": QUIET,
        "max_constructor_retry_count": TRIES,
        **LOOKS,
        **({"num_replicas": least} if most_replicas(settings) == least else {"autoscaling_config": scaling(settings)}),
    }  # fmt: skip


def scaling(settings: Settings) -> dict[str, Any]:
    """Return Ray Serve's options of autoscaling by running requests.

    The averaging window is no longer than the delays, which would have no effect otherwise.
    """
    mean = min(LOOK_BACK, max(1.0, min(settings.replica_added_after, settings.replica_removed_after)))
    return {
        "min_replicas": settings.replicas,
        "max_replicas": settings.max_replicas,
        "target_ongoing_requests": settings.replica_requests or float(settings.slots),
        "upscale_delay_s": settings.replica_added_after,
        "downscale_delay_s": settings.replica_removed_after,
        "look_back_period_s": mean,
        "metrics_interval_s": mean / REPORTS,
    }


def application(settings: Settings) -> Application:
    """Return the application that `serve.run` and `serve run` deploy; raises SettingsError."""
    settings = settings.model_copy(update={"replicas": settings.replicas or 1})
    check(settings)
    threads, gpus = threads_each(settings), gpus_each(settings)
    behind = serve.deployment(Replica, **replicas(settings, gpus)).bind(settings, threads)
    front = serve.deployment(
        Front,
        name="Front",
        max_ongoing_requests=FRONT_REQUESTS,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=float(settings.graceful_timeout + DRAIN_MARGIN),
        graceful_shutdown_wait_loop_s=0.25,
        logging_config=QUIET,
        **LOOKS,
    )
    return front.bind(behind, settings)
