"""Serving with gunicorn: one worker process that owns the model, and a thread for each running or waiting request.

The master process imports slow modules before it opens the port: until then clients are refused rather than kept waiting,
and a worker that replaces a dead one only has to load the model. The worker (`server.process.worker`) loads the model after
the fork, in the background.
"""

# ruff: noqa: PLC0415 -- the wait policy of threads is set before torch is imported
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
from server.engine_process.starts import TRIES, Starts
from server.process.worker import DRAIN_MARGIN, Worker
from server.settings import Settings, SettingsError, warnings_for
from server.startup.allocator import bound_memory
from server.startup.openmp import set_wait_policy
from server.startup.signals import ignore_signals
from server.telemetry.logs import COMPLETION, logger_class, set_up_logging

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
        """Count a worker's start; raises HaltServer if too many in a row have ended while they loaded.

        The start time of a replacement is now, and a port that the system chose is known by now.
        """
        if self.starts.hopeless:
            raise HaltServer(
                f"{TRIES} processes in a row have ended before the model was ready.", Arbiter.APP_LOAD_ERROR
            )
        self.starts.begin()
        if worker.age > 1:
            self.begun = time.monotonic()
        if not self.settings.port and not self.settings.host.startswith("unix:"):
            _, port, *_ = arbiter.LISTENERS[0].getsockname()
            self.settings = self.settings.model_copy(update={"port": port})

    def _fork_engine(self, arbiter: Arbiter, worker: Worker) -> None:
        """Fork the engine's process from the worker's before that has threads."""
        from server.engine_process.process import EngineProcess

        prepare_process(self.settings)
        self.engine = EngineProcess(self.settings, self.starts.wait)

    def load(self) -> Flask:
        return worker_app(self.settings, self.begun, engine=self.engine, starts=self.starts)


def _end_with_worker(arbiter: Arbiter, worker: Worker) -> None:
    """End the server, since a worker that shared its model with other processes cannot be replaced alone."""
    if arbiter.LISTENERS:  # the server was not stopped
        raise HaltServer("The worker ended, and with it the processes that share its model.")


def gunicorn_options(settings: Settings) -> dict[str, Any]:
    """Return gunicorn's settings for ours."""
    threads = settings.worker_threads
    return {
        "bind": settings.address.removeprefix("http://"),
        "workers": 1,  # the model and its batch live in one process; replicas are separate servers
        "worker_class": "server.process.worker.Worker",
        "threads": threads,
        "worker_connections": threads + 4096,  # beyond the threads, connections that wait for their clients' bytes
        "timeout": 120,  # the worker's main loop notifies the arbiter often, however long an answer takes
        "graceful_timeout": settings.graceful_timeout + DRAIN_MARGIN,
        "keepalive": settings.keep_alive,
        "preload_app": False,
        "proc_name": "helmsight",
        "accesslog": "-" if settings.access_log else None,
        "access_log_format": '%(t)s %(h)s "%(m)s %(U)s %(H)s" %(s)s %(B)s %(M)sms '
        f"%({{x-request-id}}o)s %({{{COMPLETION}}}e)s",
        "errorlog": "-",
        "logger_class": logger_class(settings.log_format),
        "loglevel": settings.log_level,
        "forwarder_headers": "",  # by default any local client could set SCRIPT_NAME, and thereby the routes
        "control_socket_disable": True,
        # gunicorn has just set handlers of its own at these points, in the master and in the worker.
        **dict.fromkeys(("when_ready", "post_worker_init"), lambda process: ignore_signals()),
        # No disk delays the heartbeat there.
        **({"worker_tmp_dir": "/dev/shm"} if os.access("/dev/shm", os.W_OK) else {}),
    }


def import_ahead() -> None:
    """Import slow modules without using devices, since a process that has used CUDA must not be forked."""
    set_wait_policy()
    bound_memory()
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # detects a GPU without using it
    gc.disable()  # imported objects stay, and collecting takes a sixth of the time
    import server.app
    import server.engine.runtime
    import server.engine_process.process  # noqa: F401

    gc.freeze()
    gc.enable()


def end_server() -> None:
    """End the whole server with an exit status, since an error of loading would recur a second later."""
    logging.shutdown()
    sys.stderr.flush()
    os._exit(Arbiter.APP_LOAD_ERROR)


def prepare_process(settings: Settings) -> None:
    """Prepare a process of the server before it loads a model."""
    import_ahead()
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # unreadable in a log
    transformers_logging.disable_default_handler()  # its messages go to our handlers
    transformers_logging.enable_propagation()
    set_up_logging(settings.log_level, settings.log_format)


def worker_app(
    settings: Settings,
    begun: float | None = None,
    give_up: Callable[[], None] = end_server,
    engine: EngineProcess | None = None,
    starts: Starts | None = None,
) -> Flask:
    """Return the application of a worker process; its model starts loading now, or in the `engine`'s process.

    `begun` is the server's start on the monotonic clock; `give_up` is called if the model cannot be loaded, and `starts` is
    notified once it is.
    """
    prepare_process(settings)
    from server.app import create_app
    from server.engine.resources import keep_what_is_loaded, share_interpreter
    from server.engine.runtime import Runtime, engine_of

    disable_created_metrics()  # these are a further, unused series for each counter
    share_interpreter()
    make: Callable[[Settings, Tell], ServedEngine] = engine_of if engine is None else engine.load
    if engine is None and starts is not None and starts.wait:
        make = partial(_late, starts.wait, make)
    runtime = Runtime(settings, on_failure=give_up, begun=begun, make=make)
    runtime.checks.append(lambda serving: keep_what_is_loaded())
    if starts is not None:
        runtime.checks.append(lambda serving: starts.ready())
    try:
        app = create_app(settings, runtime=runtime)
    except SettingsError as error:  # some checks require torch
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
    """Serve until a signal ends it; raises SettingsError for names that do not exist, before the port is opened."""
    set_up_logging(settings.log_level, settings.log_format)
    for warning in warnings_for(settings):
        log.warning(warning)
    if not settings.host.startswith("unix:"):
        name = "the embedded model" if settings.model == str(CHECKPOINT) else Path(settings.model).name
        log.info("loading %s for %s", name, settings.address if settings.port else f"a free port of {settings.host}")
    gunicorn = Gunicorn(settings)
    import_ahead()
    from server.app import check_names

    check_names(settings)  # here, as gunicorn would add three lines about a worker that fails on them
    gunicorn.run()


def follow(settings: Settings) -> None:
    """Take part in a model that another process serves with the same settings, until that stops or ends."""
    set_up_logging(settings.log_level, settings.log_format)
    import_ahead()
    from server.engine import local

    ignore_signals()
    engine = local.make_engine(settings)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # answers may be running; the first process decides when to end
    log.info("this is rank %s of %s, which follows rank 0", os.environ["RANK"], os.environ["WORLD_SIZE"])
    try:
        engine.follow()
    except RuntimeError as error:
        log.critical("rank 0 can no longer be followed: %s", str(error).partition("\n")[0])
        end_server()
