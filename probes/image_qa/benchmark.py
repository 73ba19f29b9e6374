"""The command of a list benchmark, with the same flags for all."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from probes.harness.benchmark import Benchmark, Findings
from probes.harness.options import VECTOR, Defaults, Names, Noise, Texts, sample_option
from probes.harness.session import Session, Setup

if TYPE_CHECKING:
    from probes.harness.comparison import Way
    from probes.image_qa.run import ListOptions
    from probes.image_qa.task import Task


def listed(
    name: str,
    *,
    help: str,
    description: str,
    limit: int,
    unit: str,
    automatic: bool = False,
    only_own: bool = False,
) -> Benchmark[ListOptions]:
    """Return the benchmark `name`, whose TASK in `probes/NAME/task.py` is imported when it runs.

    If no file is given, the demo world draws the samples of that name, if it can. `automatic`: its chats mark a text
    context, so that steering can also find its side. `only_own`: its task's own
    conditions are all there are.
    """

    def task() -> Task[Any]:
        return import_module(f"probes.{name}.task").TASK

    def options(
        setup: Setup,
        defaults: Defaults,
        *,
        data: Annotated[
            list[str] | None,
            sample_option(metavar="PATH...", help="the published files, or their folder; the demo world by default"),
        ] = None,
        images: Annotated[
            str | None,
            sample_option(metavar="DIR", help="folder of the images of --data (default: the folder of its files)"),
        ] = None,
        noise: Noise = 0.0,
        max_tokens: Annotated[
            int | None,
            Option(min=1, metavar="N", help="largest number of tokens of an answer", show_default="the benchmark's"),
        ] = None,
        vector: Annotated[str, Option(metavar="NAME|FILE", help="steering vector to use")] = VECTOR,
        baselines: Annotated[
            bool,
            Option("--baselines", help="also ask with an instruction, a chain of thought and four solved examples"),
        ] = False,
        conditions: Names = None,
        condition: Texts = None,
    ) -> ListOptions:
        from probes.harness.conditions import Wanted
        from probes.image_qa.baselines import NAMES
        from probes.image_qa.run import ListOptions

        own: dict[str, Way] = dict.fromkeys(NAMES, ()) if baselines else {}
        if only_own and (its_own := task().conditions) is not None:
            own |= its_own()
        selection = replace(
            Wanted.of(conditions, condition, defaults.vectors, own),
            vector=vector, automatic=automatic, only_own=only_own,
        )  # fmt: skip
        draw = defaults.draw.get(name)
        return ListOptions(name, selection, tuple(data or ()), images, noise, max_tokens, draw, baselines)

    def run(options: ListOptions, session: Session) -> Findings:
        from probes.image_qa.run import run

        return run(options, task(), session)

    return Benchmark(name, help, description, limit, options, run, unit)
