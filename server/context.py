"""The state that the routes of one application share."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING

from flask import current_app

from server.engine.runtime import Runtime
from server.http.watcher import Watcher
from server.images import remote
from server.images.decoded import DecodedPictures
from server.images.load import ImageLoader
from server.journal.pictures import KeptPictures, pictures_folder
from server.journal.writer import Journal
from server.requests.answer_files import AnswerFiles
from server.requests.comparison import AnswerStates
from server.requests.presets import Presets
from server.settings import Settings
from server.telemetry.metrics import Metrics
from server.wire.chat import ChatRequest, DryRun, with_interventions

if TYPE_CHECKING:
    from server.telemetry.tracing import Traces


@dataclass(frozen=True)
class AppContext:
    """The state of one application, which holds all of it."""

    settings: Settings
    runtime: Runtime
    metrics: Metrics
    watcher: Watcher
    journal: Journal
    presets: Presets
    traces: Traces | None = None
    states: AnswerStates = field(default_factory=AnswerStates)
    files: AnswerFiles = field(default_factory=AnswerFiles)
    dry_runs: type[DryRun] = field(default_factory=partial(with_interventions, DryRun))

    @property
    def chats(self) -> type[ChatRequest]:
        """The model that validates chats, with the interventions registered when the application was created."""
        return self.presets.chats

    @property
    def journal_readouts(self) -> frozenset[str]:
        """Readouts that are computed for the journal, whatever the client requests."""
        return frozenset(self.settings.journal_readouts if self.journal.enabled else ())

    @cached_property
    def decoded(self) -> DecodedPictures:
        """The cache of images that requests have sent lately."""
        return DecodedPictures(self.settings.image_cache // 4)

    @cached_property
    def pictures(self) -> KeptPictures:
        """The images of stored responses."""
        settings = self.settings
        return KeptPictures(
            pictures_folder(settings.journal.get_secret_value()), settings.store_bytes, settings.journal_days
        )

    def image_loader(self, fetched: dict[str, bytes] | None = None) -> ImageLoader:
        """Return a loader for the images of one request, of which `fetched` holds those that another loader fetched."""
        if not self.settings.allow_remote_images:
            return ImageLoader(self.settings, None, self.decoded)
        max_bytes, timeout = self.settings.max_image_bytes, self.settings.remote_image_timeout
        fetch = partial(remote.fetch, max_bytes=max_bytes, timeout=timeout)
        return ImageLoader(self.settings, fetch, self.decoded, fetched)


def context() -> AppContext:
    """Return the context of the application that serves the current request."""
    app_context: AppContext = current_app.extensions["helmsight"]
    return app_context
