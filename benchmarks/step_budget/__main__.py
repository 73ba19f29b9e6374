"""The step budget on simulated machines: `python -m benchmarks.step_budget`.

Passes have given costs on several machines, and requests arrive one by one and in bursts, in simulated time. They are
answered by the engine's own budget and by steps of a fixed chunk of prompt tokens. The budget must reach .9 of the tokens/s
of the best chunk that keeps the bound on gaps (or, where none does, of the one that a pass costs as much as) and keep the
bound where that is possible, and no prompt may wait more than twice as long as it and all before it take. With `--engine`
the real engine answers on a runner that sleeps for these costs, in slow motion, and must agree with a simulation of the same
within .2.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import steering
from benchmarks.step_budget.prices import ARRIVALS, MACHINES, Machine
from benchmarks.step_budget.simulation import FixedChunk, Outcome, Simulation
from benchmarks.step_budget.sleeping import SLOTS, Clock, Sleeping, arrivals, slowness
from steering.core.budget import StepBudget

CHUNKS = (64, 128, 256, 512, 1024, 2048, 4096)
BOUND = 0.1
COLUMNS = (
    "machine", "asked", "tokens/s", "best chunk", "ratio", "gap p99 (ms)", "first p50 (s)", "p99",
    "first p50 of the chunk (s)", "p99", "longest wait",
)  # fmt: skip


def compared(machine: Machine, arrivals_name: str, noise: float) -> tuple[Outcome, int, Outcome, bool]:
    """Return the budget's outcome, the best chunk and its outcome, and whether the chunk keeps the bound."""
    requests = ARRIVALS[arrivals_name](machine)
    ours = Simulation(machine, StepBudget(1024, BOUND), noise=noise, gap=BOUND).run(requests)
    fixed = {
        chunk: Simulation(machine, FixedChunk(chunk, machine, BOUND), noise=noise).run(requests) for chunk in CHUNKS
    }
    keeping = {chunk: outcome for chunk, outcome in fixed.items() if outcome.gap_p99 <= BOUND}
    if not keeping:
        paying = min(CHUNKS, key=lambda chunk: abs(chunk - machine.fixed / machine.token))
        return ours, paying, fixed[paying], False
    best = max(keeping, key=lambda chunk: keeping[chunk].rate)
    return ours, best, keeping[best], True


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table; return 1 where a requirement is missed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step_budget",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--machines", nargs="+", choices=list(MACHINES), default=list(MACHINES))
    parser.add_argument("--asked", nargs="+", choices=list(ARRIVALS), default=list(ARRIVALS))
    parser.add_argument("--noise", type=float, default=0.05, help="relative noise of the passes' costs (default: .05)")
    parser.add_argument("--engine", type=int, default=0, metavar="N", help="number of requests to the real engine")
    options = parser.parse_args(argv)
    if options.engine:
        return _engines(options.machines, options.engine)
    missed = 0
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for name in options.machines:
        for load in options.asked:
            ours, chunk, best, bounded = compared(MACHINES[name], load, options.noise)
            ratio = ours.rate / best.rate
            marks = ratio < 0.9, bounded and ours.gap_p99 > BOUND, ours.wait > 2
            missed += sum(marks)
            cells = (
                name, load, f"{ours.rate:.0f}", f"{chunk}" if bounded else f"({chunk})", _mark(f"{ratio:.2f}", marks[0]),
                _mark(f"{1e3 * ours.gap_p99:.0f}", marks[1]), f"{ours.first_p50:.2f}", f"{ours.first_p99:.2f}",
                f"{best.first_p50:.2f}", f"{best.first_p99:.2f}", _mark(f"{ours.wait:.2f}", marks[2]),
            )  # fmt: skip
            print(f"| {' | '.join(cells)} |", flush=True)
    return int(missed > 0)


def _engines(names: Sequence[str], count: int) -> int:
    print(
        "| machine | tokens/s | simulated | ratio | first p50 (s) | simulated | ratio |\n|---|---|---|---|---|---|---|"
    )
    mllm = steering.load(device="cpu")
    missed = 0
    for name in names:
        machine = MACHINES[name]
        sleeping = Sleeping(machine, mllm, BOUND, Clock(), slowness(machine))
        arrived, measured = sleeping.run(sleeping.requests(count, 24), arrivals(machine, count))
        simulated = Simulation(machine, StepBudget(1024, BOUND), SLOTS, noise=0.0).run(arrived)
        ratios = measured.rate / simulated.rate, measured.first_p50 / simulated.first_p50
        marks = [abs(ratio - 1) > 0.2 for ratio in ratios]
        missed += sum(marks)
        cells = (
            name, f"{measured.rate:.1f}", f"{simulated.rate:.1f}", _mark(f"{ratios[0]:.2f}", marks[0]),
            f"{measured.first_p50:.2f}", f"{simulated.first_p50:.2f}", _mark(f"{ratios[1]:.2f}", marks[1]),
        )  # fmt: skip
        print(f"| {' | '.join(cells)} |", flush=True)
    return int(missed > 0)


def _mark(text: str, missed: bool) -> str:
    return f"**{text}**" if missed else text


if __name__ == "__main__":
    sys.exit(main())
