"""Options shared by all commands: the model's options, their defaults, and how errors are reported.

Nothing heavy is imported, so that --help answers at once.
"""

from __future__ import annotations

import inspect
import logging
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path
from tempfile import TemporaryFile
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from typer import Option
from typer.core import TyperCommand

if TYPE_CHECKING:
    from steering import Engine
    from steering.model.mllm import Quantization

VECTOR = "modality-preference"
"""The name of the vector that is built and evaluated by default."""

PANEL = "The model and how it is run"

model_option = partial(Option, rich_help_panel=PANEL)
sample_option = partial(Option, rich_help_panel="Samples")
file_option = partial(Option, rich_help_panel="Files")

Threads = Annotated[int | None, model_option(min=1, metavar="N", help="CPU threads")]
Slots = Annotated[int, model_option(min=1, metavar="N", help="prompts per batch")]
Seed = Annotated[int, Option(help="seed of all random choices")]
Noise = Annotated[
    float,
    sample_option(
        min=0,
        max=255,
        metavar="SD",
        help="standard deviation of the noise on the demo world's images, on the scale of 0 to 255",
        show_default="none",
    ),
]
Quiet = Annotated[bool, Option("--quiet", help="no progress bars")]
Names = Annotated[
    list[str] | None,
    Option(metavar="NAME...", help="use only these conditions beside the baseline: names, or patterns such as 'SAGE*'"),
]
Texts = Annotated[
    list[str] | None,
    Option(
        metavar="NAME=JSON",
        help='another condition, as in an API request: \'strong={"sage": {"see": {"alpha": 0.3}}}\' (repeatable)',
    ),
]


def _anything(model: ModelOptions) -> None:
    """Accept any model."""


def own_vectors() -> list[Path]:
    """Return the user's folder of vectors."""
    return [Path("~/.helmsight/vectors").expanduser()]


@dataclass(frozen=True)
class Defaults:
    """Defaults of the commands: the `obj` of their context.

    `draw`: by the name of a kind of samples, the function that draws them where no file is given. `vectors()` returns the
    folders where vectors are searched before the model's own; the first is written to. `look(model)` raises
    ValueError for what is visibly wrong with it before anything is loaded. `locate(model)` resolves a model's short name.
    Where one command runs others, `engines` keeps the last engine for the next one.
    """

    model: str | Path | None = None
    vectors: Callable[[], Sequence[Path]] = own_vectors
    draw: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    look: Callable[[ModelOptions], None] = _anything
    locate: Callable[[str], str] = str
    engines: dict[ModelOptions, Engine] | None = None


@dataclass(frozen=True)
class ModelOptions:
    """A checkpoint and how it is run in this process; `default` if it was not requested by name.

    If `engines` is given, the engine is kept in it for the next command with the same options. The fields from
    `chat_template` on are settings of `serve` by their names.
    """

    path: str
    device: str = "auto"
    threads: int | None = None
    slots: int = 32
    default: bool = False
    look: Callable[[ModelOptions], None] = field(default=_anything, compare=False)
    engines: dict[ModelOptions, Engine] | None = field(default=None, compare=False)
    vectors: Callable[[], Sequence[Path]] = field(default=own_vectors, compare=False)
    chat_template: str | None = None
    dtype: str = "auto"
    quantization: Quantization | None = None
    device_map: str | None = None
    download: bool = False

    @classmethod
    def of(
        cls,
        defaults: Defaults,
        model: str | None = None,
        device: str | None = None,
        threads: int | None = None,
        slots: int = 32,
        chat_template: str | None = None,
        **settings: Any,
    ) -> ModelOptions:
        """Return the options of the command line; raise ValueError if no model is named and there is no default.

        settings: further ones, of which None and False were not given.
        """
        path = defaults.model if model is None else defaults.locate(model)
        if path is None:
            raise ValueError("--model is needed")
        is_default = str(path) == str(defaults.model)
        of_defaults = is_default, defaults.look, defaults.engines, defaults.vectors
        options = {name: value for name, value in settings.items() if value and not name.startswith("no_")}
        return cls(str(path), device or "auto", threads, slots, *of_defaults, chat_template, **options)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of `serve` that load the same model in the same way."""
        names = ("chat_template", "dtype", "quantization", "device", "device_map", "download")
        return {"model": self.path, **{name: getattr(self, name) for name in names}}

    @property
    def calibrations(self) -> Path:
        """The folder of the models' thresholds, within the first folder of vectors."""
        return (self.vectors() or own_vectors())[0] / "calibrations"

    def check(self) -> None:
        """Raise ValueError for what is visibly wrong with the model or the device before anything is loaded."""
        self.look(self)

    def engine(self, quiet: bool = False) -> Engine:
        """Load the model and return its engine; `quiet` hides the progress bar."""
        if self.engines is not None and self in self.engines:
            return self.engines[self]
        self.check()
        import steering

        with hide_bars() if quiet else nullcontext():
            loaded = steering.load(
                self.path,
                dtype=self.dtype,
                device=self.device,
                device_map=self.device_map,
                quantization=self.quantization,
                local_files_only=not self.download,
                calibrations=self.calibrations,
                chat_template=self.chat_template,
            )
        engine = steering.Engine(loaded, slots=self.slots, threads=self.threads)
        if self.engines is not None:
            self.engines.clear()  # only one model is in memory at a time
            self.engines[self] = engine
        return engine


@contextmanager
def hide_bars() -> Iterator[None]:
    """Hide the progress bars of Transformers while weights are read."""
    from transformers.utils import logging as transformers_logging

    bars_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if bars_enabled:
            transformers_logging.enable_progress_bar()


def log_warnings() -> None:
    """Log warnings to standard error, one line each, except for those of retried connections."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    logging.getLogger("urllib3").setLevel(logging.ERROR)


def check_writable(folder: Path) -> None:
    """Raise OSError if a folder, which need not exist yet, cannot be written to."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise NotADirectoryError(f"{folder} cannot be written to: {existing} is no folder")
    if not os.access(existing, os.W_OK):
        raise PermissionError(
            f"{folder} cannot be written to" + (f": {existing} is read-only" if existing != folder else "")
        )
    try:
        with TemporaryFile(dir=existing):  # /proc seems to be writable, to the root user
            pass
    except OSError as error:
        raise PermissionError(f"{folder} cannot be written to: {error.strerror}") from None


def check_file(file: Path) -> None:
    """Raise OSError if a file, which need not exist yet, cannot be written."""
    if file.is_dir():
        raise IsADirectoryError(f"{file} is a folder; name a file")
    check_writable(file.parent)


@contextmanager
def goes_on() -> Iterator[None]:
    """Say at Ctrl-C that the work done is kept."""
    try:
        yield
    except KeyboardInterrupt:
        print("\nStopped. Finished work is kept: run the same command again to continue.", file=sys.stderr)
        raise


SAID = "helmsight.said"
"""The key in a context's `meta` under which the command line is kept, ready to be run again."""


class Command(TyperCommand):
    """A command whose options with a metavar ending in dots take all words up to the next option, as `--layers 3 4`.

    If the metavar is in brackets, an option without a word means all its choices.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as Typer does, but never take an option for the value of the one before it."""
        ctx.meta[SAID] = shlex.join([*ctx.command_path.split(), *args])
        return super().parse_args(ctx, list(self._one_value_each(ctx, args)))

    def _one_value_each(self, ctx: Any, args: list[str]) -> Iterator[str]:
        options: dict[str, Any] = {
            name: parameter
            for parameter in self.get_params(ctx)
            for name in (*parameter.opts, *parameter.secondary_opts)
            if name[0] == "-"
        }
        remaining = list(args)
        while remaining:
            word = remaining.pop(0)
            yield word
            option = options.get(word)
            if word == "--":
                yield from remaining
                return
            if option is None or getattr(option, "is_flag", False):
                continue
            metavar = option.metavar or ""
            most = len(remaining) if metavar.endswith("...") else option.nargs
            values = remaining[
                : next(
                    (i for i, argument in enumerate(remaining[:most]) if argument in options or argument[:2] == "--"),
                    most,
                )
            ]
            remaining = remaining[len(values) :]
            if not values and metavar.startswith("["):
                values = list(option.type_descriptor.choices)
            if not values and not ctx.resilient_parsing:  # a shell that completes the value may leave it out
                ctx.fail(f"Option {word} needs a value.")
            yield from values[:1]
            for value in values[1:]:
                yield from (word, value) if metavar.endswith("...") else (value,)


def flag(name: str, kind: Any, option: Any, default: Any = None) -> inspect.Parameter:
    """Return a flag that is not written in a command's signature, with Typer's options for it."""
    annotated = Annotated[kind, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotated)


def flags_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the keyword-only parameters of a function; its other annotations may exist for type checkers only."""
    parameters = [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY
    ]
    stated = SimpleNamespace(__annotations__={parameter.name: parameter.annotation for parameter in parameters})
    kinds = get_type_hints(stated, vars(sys.modules[function.__module__]), include_extras=True)
    return [parameter.replace(annotation=kinds[parameter.name]) for parameter in parameters]


def with_flags(command: Callable[..., None], flags: Iterable[inspect.Parameter]) -> Callable[..., None]:
    """Return a command that takes these flags besides its own: in its `**given`, or replacing one of the same name."""

    @wraps(command)
    def called(**arguments: Any) -> None:
        command(**arguments)

    stated = inspect.signature(command, eval_str=True).parameters.values()
    own_parameters = {
        parameter.name: parameter.replace(kind=parameter.KEYWORD_ONLY)
        for parameter in stated
        if parameter.kind is not parameter.VAR_KEYWORD
    }
    every = own_parameters | {flag.name: flag for flag in flags}
    called.__signature__ = inspect.Signature(list(every.values()))  # type: ignore[attr-defined]
    return called


def run(
    app: typer.Typer,
    argv: Sequence[str] | None,
    defaults: Defaults,
    usage: Callable[[], tuple[type[Exception], ...]] = tuple,
) -> int:
    """Run a command line and return its exit status.

    An error that a user can correct is one line on standard error. The status is 2 for what is wrong with the command line
    itself and for errors of `usage()`, 1 for anything else, and Typer's 130 for Ctrl-C.
    """
    try:
        ended = typer.main.get_command(app).main(argv, prog_name="helmsight", standalone_mode=False, obj=defaults)
    except typer.TyperException as error:
        return _tell(_sentence(error), error.exit_code)
    except Exception as error:
        if isinstance(error, usage()):
            return _tell(f"helmsight: {error}", 2)
        if not isinstance(error, (ValueError, OSError)):
            from steering.errors import SteeringError

            if not isinstance(error, SteeringError):
                raise
        return _tell(f"helmsight: {_reason(error)}", 1)
    return ended if isinstance(ended, int) else 0


def _reason(error: Exception) -> str:
    """Return the message, with the file first for an error of the operating system."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _sentence(error: typer.TyperException) -> str:
    """Return what is wrong with a command line, and the option that is probably meant."""
    context = getattr(error, "ctx", None)
    possibilities = getattr(error, "possibilities", None)
    message = f"{error.message}; did you mean {possibilities[0]}?" if possibilities else error.format_message()
    return message and f"{context.command_path if context else 'helmsight'}: {message}"


def _tell(sentence: str, status: int) -> int:
    """Print a sentence, with its prefix in red if the terminal shows colours, and return the status."""
    from rich.console import Console
    from rich.text import Text

    if sentence:
        program, colon, message = sentence.partition(":")
        text = Text.assemble((program + colon, "bold red"), message)
        Console(stderr=True, soft_wrap=True).print(text)
    return status
