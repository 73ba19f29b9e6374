"""Serving with gunicorn: one worker process that owns the model (`server.process.worker`), one thread for each request
that runs or waits.

The master process imports what takes seconds to import before it opens the port: until then clients are refused rather than
kept waiting, and a worker that takes a dead one's place has only the model to load. The model itself is the worker's, which
loads it after the fork, in the background.
"""

# ruff: noqa: PLC0415 -- how threads wait is set before torch is imported
from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gunicorn.app.base import BaseApplication
from gunicorn.arbiter import Arbiter
from gunicorn.errors import HaltServer
from prometheus_client import disable_created_metrics

from demo import CHECKPOINT
from server.allocator import bound_memory
from server.engine_process.starts import TRIES, Starts
from server.openmp import set_wait_policy
from server.process.worker import DRAIN_MARGIN, Worker
from server.settings import Settings, SettingsError, warnings_for
from server.signals import ignore_signals
from server.telemetry.logs import logger_class, set_up_logging

if TYPE_CHECKING:
    from flask import Flask

    from server.engine.progress import Tell
    from server.engine.served import ServedEngine
    from server.engine_process.process import EngineProcess

log = logging.getLogger("helmsight")


class Gunicorn(BaseApplication):
    """gunicorn with our settings, in this process."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.engine: EngineProcess | None = None
        self.begun = time.monotonic()
        self.starts = Starts()
        super().__init__()

    def load_config(self) -> None:
        for name, value in gunicorn_options(self.settings).items():
            self.cfg.set(name, value)
        self.cfg.set("pre_fork", self._fork)
        if self.settings.apart:
            self.cfg.set("post_fork", self._fork_engine)
        if self.settings.tensor_parallel > 1:
            self.cfg.set("child_exit", _end_with_worker)

    def _fork(self, arbiter: Arbiter, worker: Worker) -> None:
        """A worker that takes another's place begins now, unless too many have ended while they loaded."""
        if self.starts.hopeless:
            raise HaltServer(
                f"{TRIES} processes in a row have ended before the model was ready.", Arbiter.APP_LOAD_ERROR
            )
        self.starts.begin()
        if worker.age > 1:
            self.begun = time.monotonic()

    def _fork_engine(self, arbiter: Arbiter, worker: Worker) -> None:
        """The engine's process comes from the worker's before that has threads."""
        from server.engine_process.process import EngineProcess

        prepare_process(self.settings)
        self.engine = EngineProcess(self.settings, self.starts.wait)

    def load(self) -> Flask:
        return worker_app(self.settings, self.begun, engine=self.engine, starts=self.starts)


def _end_with_worker(arbiter: Arbiter, worker: Worker) -> None:
    """A worker that shared its model with other processes cannot be replaced alone."""
    if arbiter.LISTENERS:  # it was not stopped
        raise HaltServer("The worker ended, and with it what shares its model.")


def gunicorn_options(settings: Settings) -> dict[str, Any]:
    """gunicorn's settings for ours."""
    threads = settings.worker_threads
    host = f"[{settings.host}]" if ":" in settings.host and settings.host[0] not in "[u" else settings.host
    return {
        "bind": host if host.startswith("unix:") else f"{host}:{settings.port}",
        "workers": 1,  # the model and its batch live in one process; replicas are separate servers
        "worker_class": "server.process.worker.Worker",
        "threads": threads,
        "worker_connections": threads + 4096,  # beyond the threads: those that wait for bytes of their clients
        "timeout": 120,  # the worker's main loop beats each second, however long an answer takes
        "graceful_timeout": settings.graceful_timeout + DRAIN_MARGIN,
        "keepalive": settings.keep_alive,
        "preload_app": False,
        "proc_name": "helmsight",
        "accesslog": "-" if settings.access_log else None,
        "access_log_format": '%(h)s "%(m)s %(U)s %(H)s" %(s)s %(B)s %(M)sms %({x-request-id}o)s',
        "errorlog": "-",
        "logger_class": logger_class(settings.log_format),
        "loglevel": settings.log_level,
        "forwarder_headers": "",  # by default any local client could give SCRIPT_NAME, and with it the routes
        "control_socket_disable": True,
        # Where gunicorn has just set handlers of its own, in the master and in the worker.
        **dict.fromkeys(("when_ready", "post_worker_init"), lambda process: ignore_signals()),
        **({"worker_tmp_dir": "/dev/shm"} if os.access("/dev/shm", os.W_OK) else {}),  # a heartbeat that no disk delays
    }


def import_ahead() -> None:
    """Import what takes seconds, and leave the devices alone: a process that has used CUDA must not be forked."""
    set_wait_policy()
    bound_memory()
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # whether there is a GPU is told without using it
    gc.disable()  # nothing of what is imported goes away again, and looking takes a sixth of the time
    import server.app
    import server.engine.runtime
    import server.engine_process.process  # noqa: F401

    gc.freeze()
    gc.enable()


def end_server() -> None:
    """What cannot be loaded or is not known now will not be a second later: end the whole server, with an exit status."""
    logging.shutdown()
    sys.stderr.flush()
    os._exit(Arbiter.APP_LOAD_ERROR)


def prepare_process(settings: Settings) -> None:
    """What a process of the server needs before it loads a model."""
    import_ahead()
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # it would be a smear in a log
    transformers_logging.disable_default_handler()  # what it has to say goes where all else is said
    transformers_logging.enable_propagation()
    set_up_logging(settings.log_level, settings.log_format)


def worker_app(
    settings: Settings,
    begun: float | None = None,
    give_up: Callable[[], None] = end_server,
    engine: EngineProcess | None = None,
    starts: Starts | None = None,
) -> Flask:
    """The application inside a worker process; its model starts loading now, unless the `engine`'s process does that.
    `begun` is when the server was started, on the monotonic clock; `give_up` is called where the model cannot be loaded, and
    `starts` is told once it is."""
    prepare_process(settings)
    from server.app import create_app
    from server.engine import local
    from server.engine.resources import keep_what_is_loaded, share_interpreter
    from server.engine.runtime import Runtime

    disable_created_metrics()  # one more series for each counter, which nobody asks for
    share_interpreter()
    make: Callable[[Settings, Tell], ServedEngine] = local.load if engine is None else engine.load
    if engine is None and starts is not None and starts.wait:
        make = partial(_late, starts.wait, make)
    runtime = Runtime(settings, on_failure=give_up, begun=begun, make=make)
    runtime.checks.append(lambda serving: keep_what_is_loaded())
    if starts is not None:
        runtime.checks.append(lambda serving: starts.ready())
    try:
        app = create_app(settings, runtime=runtime)
    except SettingsError as error:  # of what only those know who have imported torch
        log.critical(str(error))
        give_up()
        raise
    runtime.start()
    return app


def _late(
    seconds: float, make: Callable[[Settings, Tell], ServedEngine], settings: Settings, tell: Tell
) -> ServedEngine:
    time.sleep(seconds)
    return make(settings, tell)


def serve(settings: Settings) -> None:
    """Serve until a signal ends it."""
    set_up_logging(settings.log_level, settings.log_format)
    for warning in warnings_for(settings):
        log.warning(warning)
    if not settings.host.startswith("unix:"):
        name = "the embedded model" if settings.model == str(CHECKPOINT) else Path(settings.model).name
        log.info("loading %s for http://%s:%d", name, settings.host, settings.port)
    gunicorn = Gunicorn(settings)
    import_ahead()
    gunicorn.run()


def follow(settings: Settings) -> None:
    """Take part in what another process serves with the same settings, until that stops or ends."""
    set_up_logging(settings.log_level, settings.log_format)
    import_ahead()
    from server.engine import local

    ignore_signals()
    engine = local.make_engine(settings)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(
            number, signal.SIG_IGN
        )  # answers may be running, and the first process knows when they have ended
    log.info("this is rank %s of %s, which follows the first one", os.environ["RANK"], os.environ["WORLD_SIZE"])
    try:
        engine.follow()
    except RuntimeError as error:
        log.critical("the first rank can no longer be followed: %s", str(error).partition("\n")[0])
        end_server()
