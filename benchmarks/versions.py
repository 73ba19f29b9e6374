"""Compare two checkouts: `python -m benchmarks.versions OLD NEW` prints a table of NEW's times by OLD's.

Both are alive at once and run each workload in turns, a fraction of a second each, because a machine changes its speed
within minutes; the result is the median of the ratios of CPU time. There are several pairs of processes, because one may be
luckier than another. The workloads are answers without interventions, sampled ones, steered ones, ones with all readouts and
ones under SAGE, one and 16 at once, of the embedded and of a wide model. `--compiled` runs compiled steps, as servers do on
a CPU. `--http` starts a server of each checkout and compares their tokens/s.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from statistics import median, quantiles
from typing import Any

TOKENS = 64


def workloads(model: str, compiled: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield timed functions by name, with whichever checkout is imported.

    model: "demo", or the folder of the wide one.
    """
    import torch  # noqa: PLC0415 -- the process that starts the others needs none of these
    from PIL import Image  # noqa: PLC0415

    import steering  # noqa: PLC0415

    wide = model != "demo"
    folder = Path(model) if wide else Path(steering.__file__).parents[1] / "demo" / "checkpoint"
    mllm = steering.load(folder, device="cpu")
    engine = steering.Engine(mllm, slots=16, max_length=1024, self_check=False, threads=1, compiled=compiled)
    picture = Image.linear_gradient("L").convert("RGB").resize((420, 420) if wide else (256, 256))
    length: dict[str, Any] = {"max_tokens": TOKENS // 4 if wide else TOKENS, "ignore_eos": True}
    greedy = steering.Sampling(**length)
    directions = torch.randn(mllm.num_layers, mllm.hidden_size, generator=torch.Generator().manual_seed(0))
    weights = (torch.ones(mllm.num_layers),) * 3
    vector = steering.SteeringVector("v", directions, *weights, tuple(range(2, mllm.num_layers)), mllm.fingerprint)
    sage = [steering.See(), steering.Generate()] if wide else [steering.See(), steering.Think(), steering.Generate()]
    observed = frozenset({"focus", "modality", "decay", "residual", "patches", "tam", "flags"})
    kinds: dict[str, dict[str, Any]] = {
        "plain": {},
        "sampled": {
            "sampling": steering.Sampling(temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.05, **length)
        },
        "steered": {"interventions": steering.Steer(vector, 0.1)},
        "readouts": {"diagnose": steering.Diagnose(observed)},
        "SAGE": {"interventions": steering.Sage(*sage)},
    }

    def requests(count: int, **options: Any) -> list[steering.Request]:
        chats = (
            [{"type": "image", "image": picture.rotate(7 * i)}, {"type": "text", "text": "What is this?" * (1 + i % 3)}]
            for i in range(count)
        )
        return [
            steering.Request([{"role": "user", "content": chat}], **{"sampling": greedy, **options}) for chat in chats
        ]

    for kind, options in kinds.items():
        for count in (1, 16):
            batch = requests(count, **options)
            yield f"{'wide' if wide else 'demo'}, {kind}, {count}", lambda batch=batch: engine.generate(batch)


def serve(arguments: argparse.Namespace) -> None:
    """Run the workload named by each line of the input once, and print its seconds.

    They are the seconds that it returns, or else its CPU time.
    """
    # Loaded by the path of this file, because the package `benchmarks` is the other checkout's.
    if arguments.of == "journal":
        runs = dict(import_module("journal").workloads(arguments.postgres))
    else:
        runs = {}
        for model in arguments.models:
            runs |= workloads(model, arguments.compiled)
    for run in runs.values():
        run()
    print(json.dumps(list(runs)), flush=True)
    for line in sys.stdin:
        started = time.process_time()
        duration = runs[line.strip()]()
        print(duration if isinstance(duration, float) else time.process_time() - started, flush=True)


class Side:
    """A checkout in a process of its own."""

    def __init__(self, folder: Path, arguments: Sequence[str]):
        environment = os.environ | {"PYTHONPATH": str(folder.resolve()), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, __file__, *arguments], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        self.names: list[str] = json.loads(self._read_line())

    def seconds(self, name: str) -> float:
        """Return the seconds that one run of a workload takes."""
        assert self._process.stdin is not None
        self._process.stdin.write(name + "\n")
        self._process.stdin.flush()
        return float(self._read_line())

    def close(self) -> None:
        self._process.communicate()

    def _read_line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


def served(checkouts: Sequence[Path], clients: Sequence[int], rounds: int) -> None:
    """Start a server of each checkout and print a table of both under the same loads, a new picture a request."""
    from benchmarks.load import run  # noqa: PLC0415
    from benchmarks.load.serving import COMPILED, READY, serving  # noqa: PLC0415

    with ExitStack() as ends:
        names = []
        for name, folder in zip(("old", "new"), checkouts, strict=True):
            server = ends.enter_context(serving(checkout=folder, until=(READY, COMPILED)))
            names.append(f"{name}={server.url}/v1=helmsight-demo")
        loads = ["--workloads", "picture", "--tokens", str(TOKENS), "--repeats", str(rounds)]
        run.main([*names, *loads, "--clients", *map(str, clients)])


def compared(checkouts: Sequence[Path], passed: Sequence[str], arguments: argparse.Namespace) -> None:
    """Run both checkouts' workloads in turns and print a table."""
    durations: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for _ in range(arguments.processes):
        old, new = (Side(folder, passed) for folder in checkouts)
        for turn in range(arguments.rounds):
            for name in arguments.only or old.names:
                if turn % 2:
                    after, before = new.seconds(name), old.seconds(name)
                else:
                    before, after = old.seconds(name), new.seconds(name)
                durations[name].append((before, after))
        old.close()
        new.close()
    print("| what | new / old | middle half | old (ms) | new (ms) |\n|---|---|---|---|---|")
    for name, pairs in durations.items():
        low, middle, high = quantiles((after / before for before, after in pairs), n=4)
        milliseconds = " | ".join(f"{1000 * median(side):.1f}" for side in zip(*pairs, strict=True))
        print(f"| {name} | {middle:.3f} | {low:.3f} to {high:.3f} | {milliseconds} |")


def main() -> None:
    """Measure both checkouts in turns and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("checkouts", nargs="*", type=Path, metavar="FOLDER", help="the old one and the new one")
    parser.add_argument(
        "--of", choices=("engine", "journal"), default="engine", help="the part that is compared (default: engine)"
    )
    parser.add_argument("--models", nargs="+", default=["demo", "wide"], help="demo, wide (default: both)")
    parser.add_argument("--compiled", action="store_true", help="run compiled steps; each process compiles for minutes")
    parser.add_argument(
        "--http", nargs="+", type=int, metavar="CLIENTS", help="compare servers, with these numbers of clients"
    )
    parser.add_argument("--postgres", metavar="URL", help="an empty database, to measure a journal in PostgreSQL, too")
    parser.add_argument("--processes", type=int, default=2, help="pairs of processes (default: 2)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each workload in each pair (default: 5)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="workloads by name (default: all)")
    arguments = parser.parse_args()
    if not arguments.checkouts:
        serve(arguments)
    elif arguments.http:
        served(arguments.checkouts, arguments.http, arguments.rounds)
    else:
        with tempfile.TemporaryDirectory() as folder:
            models = [folder if model == "wide" else model for model in arguments.models]
            if folder in models:
                subprocess.run(
                    [sys.executable, "-m", "benchmarks.models", folder], check=True, stdout=subprocess.DEVNULL
                )
            passed = ["--of", arguments.of, "--models", *models, *(["--compiled"] if arguments.compiled else [])]
            passed += ["--postgres", arguments.postgres] if arguments.postgres else []
            compared(arguments.checkouts, passed, arguments)


if __name__ == "__main__":
    main()
