"""`helmsight serve --replicas`: Ray and Ray Serve on this machine alone, for as long as the command runs."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from gunicorn.arbiter import Arbiter

from server.replicas.checks import check, most_replicas
from server.settings import Settings, warnings_for
from server.telemetry.logs import set_up_logging

log = logging.getLogger("helmsight")

STORE = 256 * 2**20
"""Bytes of Ray's object store, through which large bodies go."""
MARGIN = 3.0
"""Seconds that the end of drained answers may take to reach their clients."""
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",  # by default Ray tells its makers of every cluster
    "RAY_DEDUP_LOGS": "0",  # no line of a log is left out because it is like another one
    "RAY_COLOR_PREFIX": "0",
    "RAY_worker_niceness": "0",  # by default everything else on the machine goes before the replicas
    # A token then takes the front and the proxy 0.6 ms of a processor, instead of 1.6.
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
}
"""What Ray does otherwise, where the user's own environment says nothing."""


class Ended(BaseException):
    """A signal asks for the end."""


def run(settings: Settings) -> None:
    """Serve until a signal ends it; raises SettingsError."""
    check(settings)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import ray  # noqa: PLC0415 -- an extra, which reads the environment when it is imported
    from ray import serve  # noqa: PLC0415

    from server.replicas.application import NAME, QUIET, application, threads_each  # noqa: PLC0415

    begun = time.monotonic()
    set_up_logging(settings.log_level, settings.log_format)
    for warning in warnings_for(settings):
        log.warning(warning)
    threads, most = threads_each(settings), most_replicas(settings)
    log.info("starting %d replicas, at most %d, with %d CPU threads each", settings.replicas, most, threads)
    log.warning("Ray's own ports are open on all addresses of this machine; only --port is meant for others")
    front: Any = None
    try:
        ray.init(
            address="local", num_cpus=threads * most, include_dashboard=False, object_store_memory=STORE,
            logging_level=logging.WARNING,
        )  # fmt: skip
        _on_signals(_end)  # Ray has handlers of its own until then
        serve.start(
            proxy_location="HeadOnly", logging_config=QUIET,
            http_options={
                "host": settings.host.strip("[]"), "port": settings.port, "keep_alive_timeout_s": settings.keep_alive
            },
        )  # fmt: skip
        try:
            front = serve.run(application(settings), name=NAME, logging_config=QUIET)
        except RuntimeError as error:
            log.critical("the replicas could not be started; what they have logged says why: %s", error)
            raise SystemExit(Arbiter.APP_LOAD_ERROR) from None
        log.info(
            "%d replicas are ready after %.1f s at http://%s:%d",
            settings.replicas, time.monotonic() - begun, settings.host, settings.port,
        )  # fmt: skip
        while True:
            signal.pause()
    except Ended:
        _on_signals(signal.SIG_IGN)
        if front is not None:
            log.info("draining: new requests are refused, running ones get up to %d s", settings.graceful_timeout)
            try:
                front.drain.remote().result(timeout_s=settings.graceful_timeout + MARGIN)
            except Exception as error:  # whatever it is, the end goes on
                log.warning("the replicas did not say that they have ended: %s", type(error).__name__)
    finally:
        serve.shutdown()
        ray.shutdown()


def _end(number: int, frame: FrameType | None) -> None:
    raise Ended


def _on_signals(act: Callable[[int, FrameType | None], Any] | signal.Handlers) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, act)
