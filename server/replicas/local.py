"""`helmsight serve --replicas`: Ray and Ray Serve on this machine only, for as long as the command runs."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from gunicorn.arbiter import Arbiter

from server.process.replica_checks import check, most_replicas
from server.settings import Settings, warnings_for
from server.startup.signals import ignore_signals
from server.telemetry.logs import set_up_logging

log = logging.getLogger("helmsight")

STORE = 256 * 2**20
"""Size in bytes of Ray's object store, which large bodies pass through."""
POLL = 0.1
MARGIN = 3.0
"""Seconds for the end of drained answers to reach their clients."""
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",  # by default Ray reports every cluster to its makers
    "RAY_DEDUP_LOGS": "0",  # keeps log lines that resemble others
    "RAY_COLOR_PREFIX": "0",
    "RAY_ENABLE_AUTO_CONNECT": "0",  # late calls must not restart Ray after its end
    "RAY_worker_niceness": "0",  # by default all other processes take precedence over the replicas
    # A token then costs the front and the proxy 0.6 ms of CPU time instead of 1.6.
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(2**31 - 1),  # the default limits requests and answers to 4 MiB
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    # The node's address is then 127.0.0.1, and Ray's own ports, except the replicas', are open there only.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "token",
    # On a busy machine Ray's default of 5 seconds ends before its proxy has started, which would be killed.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
}
"""Defaults of Ray's environment variables, which the user's own environment overrides."""


def run(settings: Settings) -> None:
    """Serve until a signal ends it; raises SettingsError."""
    check(settings)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if "RAY_AUTH_TOKEN_PATH" not in os.environ:  # Ray would write a world-readable token into the home folder
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    set_up_logging(settings.log_level, settings.log_format)
    for warning in warnings_for(settings):
        log.warning(warning)
    ended, connected = threading.Event(), threading.Event()
    _listen(ended)
    # In the main thread Ray would handle SIGTERM itself. Ray's processes end with the thread that starts them.
    serving = ThreadPoolExecutor(1, "helmsight-ray").submit(_serve, settings, ended, connected)
    while not (serving.done() or connected.is_set()):
        time.sleep(POLL)
    _listen(ended)  # replaces Ray's handler, which aborts the process three seconds after a signal
    while not serving.done():
        time.sleep(POLL)
    serving.result()


def _listen(ended: threading.Event) -> None:
    """Set `ended` on signals.

    They raise nothing, since that would interrupt the main thread anywhere, possibly while it holds locks.
    """
    ignore_signals()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, lambda number, frame: ended.set())


def _serve(settings: Settings, ended: threading.Event, connected: threading.Event) -> None:
    import ray  # noqa: PLC0415 -- an extra, which reads the environment when it is imported
    from ray import serve  # noqa: PLC0415

    from server.replicas.application import NAME, QUIET, application, threads_each  # noqa: PLC0415

    begun, threads, most = time.monotonic(), threads_each(settings), most_replicas(settings)
    log.info("starting %d replicas, at most %d, with %d CPU threads each", settings.replicas, most, threads)
    try:
        ray.init(
            address="local", num_cpus=threads * most, include_dashboard=False, object_store_memory=STORE,
            logging_level=logging.ERROR,
        )  # fmt: skip
        connected.set()
        serve.start(
            proxy_location="HeadOnly", logging_config=QUIET,
            http_options={
                "host": settings.host.strip("[]"), "port": settings.port, "keep_alive_timeout_s": settings.keep_alive
            },
        )  # fmt: skip
        running: Future[Any] = Future()

        def deploy() -> None:
            try:
                running.set_result(serve.run(application(settings), name=NAME, logging_config=QUIET))
            except Exception as error:
                running.set_exception(error)

        threading.Thread(target=deploy, name="helmsight-deploy", daemon=True).start()
        while not running.done() and not ended.wait(POLL):
            pass
        if not running.done():
            return
        try:
            front = running.result()
        except RuntimeError as error:
            log.critical("the replicas could not be started; see what they have logged: %s", error)
            raise SystemExit(Arbiter.APP_LOAD_ERROR) from None
        log.info(
            "%d replicas are ready after %.1f s at http://%s:%d",
            settings.replicas, time.monotonic() - begun, settings.host, settings.port,
        )  # fmt: skip
        ended.wait()
        log.info("draining: new requests are refused, running ones get up to %d s", settings.graceful_timeout)
        try:
            front.drain.remote().result(timeout_s=settings.graceful_timeout + MARGIN)
        except Exception as error:  # no error may stop the shutdown
            log.warning("the replicas did not report that they have ended: %s", type(error).__name__)
    finally:
        serve.shutdown()
        ray.shutdown()
