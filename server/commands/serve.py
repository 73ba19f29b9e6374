"""`helmsight serve`: the model over HTTP."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from probes.harness.options import Command, with_flags
from server.commands.options import Config, settings_flags, settings_of

EPILOG = "Every flag is also a variable (HELMSIGHT_PORT=8001) and a key in the file of --config (port = 8001)."


def register(app: typer.Typer) -> None:
    """Add the command."""
    flagged = with_flags(serve, settings_flags())
    app.command("serve", cls=Command, epilog=EPILOG)(flagged)


def serve(
    checkpoint: Annotated[str | None, typer.Argument(metavar="MODEL", help="The model, as --model names it.")] = None,
    config: Config = None,
    **flags: Any,
) -> None:
    """Serve a model behind OpenAI's chat completions and Responses, and Anthropic's Messages."""
    if checkpoint is not None:
        if flags.get("model") is not None:
            raise typer.BadParameter("is given twice, also as --model", param_hint="MODEL")
        flags["model"] = checkpoint
    settings = settings_of(config, **flags)
    from server import serving
    from server.process.preflight import preflight

    preflight(settings, place=not settings.follows)
    if settings.follows:
        serving.follow(settings)
    elif settings.replicas is None:
        serving.serve(settings)
    else:
        from server.replicas import local

        local.run(settings)
