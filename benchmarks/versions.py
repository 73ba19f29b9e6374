"""Two checkouts side by side: `python -m benchmarks.versions OLD NEW` prints how NEW compares, measured in turns.

Each side runs in processes of its own, a few rounds each, and the least CPU time of all of them counts: what other programs
take, and what a process is luckier in than another, is the same for both.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

ROUNDS = 9
TOKENS = 64


def workloads() -> Iterator[tuple[str, Callable[[], object]]]:
    """What is timed, by name, on the embedded model; with whichever checkout is imported."""
    from PIL import Image  # noqa: PLC0415 -- the process that starts the others needs neither

    import steering  # noqa: PLC0415

    folder = Path(steering.__file__).parents[1] / "demo" / "checkpoint"
    engine = steering.Engine(steering.load(folder, device="cpu"), slots=16, self_check=False, threads=1)
    picture = Image.linear_gradient("L").convert("RGB")
    sampling = steering.Sampling(max_tokens=TOKENS, ignore_eos=True)
    flat = "interventions" in steering.Request.__dataclass_fields__
    sage = steering.Sage(steering.See(), steering.Think(), steering.Generate())
    observed = frozenset({"focus", "modality", "decay", "residual", "patches", "tam", "flags"})

    def requests(count: int, **options: object) -> list[steering.Request]:
        chats = (
            [{"type": "image", "image": picture.rotate(7 * i)}, {"type": "text", "text": "What is this?" * (1 + i % 3)}]
            for i in range(count)
        )
        return [steering.Request([{"role": "user", "content": chat}], sampling, **options) for chat in chats]

    for name, asked in (
        ("one request", requests(1)),
        ("16 requests", requests(16)),
        ("one, focus + modality + decay", requests(1, diagnose=steering.Diagnose())),
        ("16, focus + modality + decay", requests(16, diagnose=steering.Diagnose())),
        ("one, seven readouts", requests(1, diagnose=steering.Diagnose(observed))),
        ("4 under SAGE", requests(4, **{"interventions" if flat else "sage": sage})),
    ):
        yield name, lambda asked=asked: engine.generate(asked)


def measure() -> dict[str, float]:
    """The least CPU time in seconds of each workload."""
    found = {}
    for name, run in workloads():
        run()
        times = []
        for _ in range(ROUNDS):
            started = time.process_time()
            run()
            times.append(time.process_time() - started)
        found[name] = min(times)
    return found


def main() -> None:
    """Measure both checkouts in turns and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("checkouts", nargs="*", type=Path, metavar="FOLDER", help="the old one and the new one")
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    if not arguments.checkouts:
        print(json.dumps(measure()))
        return
    least: defaultdict[str, list[float]] = defaultdict(lambda: [float("inf")] * len(arguments.checkouts))
    for _ in range(arguments.turns):
        for i, folder in enumerate(arguments.checkouts):
            environment = os.environ | {"PYTHONPATH": str(folder.resolve()), "OMP_NUM_THREADS": "1"}
            command = [sys.executable, __file__]
            said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
            for name, seconds in json.loads(said).items():
                least[name][i] = min(least[name][i], seconds)
    print("| what | new / old | old | new |\n|---|---|---|---|")
    for name, (old, new) in least.items():
        print(f"| {name} | **{new / old:.3f}** | {1000 * old:.1f} ms | {1000 * new:.1f} ms |")


if __name__ == "__main__":
    main()
