"""A run of a benchmark: the answerer of its questions, and where the answers and the report are kept."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from probes.answering.versions import versions
from probes.harness.options import ModelOptions, check_file, check_writable

if TYPE_CHECKING:
    from probes.answering.base import Answerer
    from probes.answering.endpoint import Endpoint
    from steering import Engine
    from steering.readiness import PartState


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Setup:
    """The options common to all runs.

    `limit`: the number of samples. `out`: the folder of the report, and of the answers from which an interrupted run
    continues. `json`, `markdown`: further files for the scores and the report.
    """

    model: ModelOptions
    limit: int
    seed: int
    quiet: bool
    out: Path
    base_url: str | None = None
    json: Path | None = None
    markdown: Path | None = None

    def check(self) -> None:
        """Raise ValueError or OSError for a model that cannot be loaded or a place that cannot be written to."""
        if self.base_url is None:
            self.model.check()
        check_writable(self.out)
        for file in (self.json, self.markdown):
            if file is not None:
                check_file(file)


class Session:
    """The answerer of a run: the server of --base-url, or the model in this process, which is loaded when first needed.

    Raises ValueError if there is no such server, or if the packages that compute intervals are not installed.
    """

    def __init__(self, setup: Setup) -> None:
        from probes.harness.bootstrap import check_statistics

        check_statistics()
        self.setup = setup
        self.lacks: list[str] = []
        """What was left out, or used without its calibration; reports show it."""
        self.endpoint: Endpoint | None = None
        if setup.base_url is not None:
            from probes.answering.endpoint import Endpoint

            model_name = None if setup.model.default else setup.model.path
            self.endpoint = Endpoint(setup.base_url, model=model_name)

    @cached_property
    def engine(self) -> Engine | None:
        """The engine in this process; None with a server."""
        return None if self.endpoint is not None else self.setup.model.engine(self.setup.quiet)

    @cached_property
    def answerer(self) -> Answerer:
        """The answerer, which keeps every answer in the folder and does not ask again for kept ones."""
        from probes.answering.engine import InProcess
        from probes.harness.ledger import Remembering

        inner = InProcess(self.engine) if self.engine is not None else self.endpoint
        assert inner is not None
        return Remembering(inner, self.setup.out / "answers.jsonl")

    def lack(self, text: str) -> None:
        """Note something that was left out, or is used without its calibration, for the log and the report."""
        log.warning(text)
        self.lacks.append(text)

    def prepared(self) -> list[PartState]:
        """Return the state of the parts that are measured once for the model; empty for a server that does not tell."""
        if self.endpoint is not None:
            return self.endpoint.prepared()
        from steering.readiness import states

        assert self.engine is not None
        calibration = self.engine.mllm.calibration
        return states(() if calibration is None else calibration.parts)

    @property
    def model(self) -> str:
        """The model's name in a report, with the server's address if it is behind one."""
        if self.endpoint is not None:
            return f"{self.endpoint.model} at {self.setup.base_url}"
        assert self.engine is not None
        return self.engine.mllm.name

    @property
    def versions(self) -> dict[str, str]:
        """The versions of the packages that the numbers depend on; a server's own are not known."""
        known_versions = versions()
        return known_versions if self.endpoint is None else {"helmsight": known_versions["helmsight"]}
