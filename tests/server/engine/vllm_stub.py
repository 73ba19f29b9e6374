"""A stand-in for the interpreter of `--vllm-env`: it notes how it was called, and serves as `vllm serve` with the plugin."""

from __future__ import annotations

import json
import os
import sys
from itertools import pairwise
from pathlib import Path

from server.engine.local import load_without_weights
from server.settings import Settings
from tests.steering.vllm.computing import PlainAnswers
from tests.steering.vllm.fake import FakeVllm, facts_of


def write_environment(folder: Path, root: Path) -> Path:
    """Write a folder that looks like a virtual environment, whose interpreter runs this file, and return it.

    root: the repository. Asked for its packages (`-I`), the interpreter has all.
    """
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(
        f'#!/bin/sh\n[ "$1" = -I ] && exit 0\nPYTHONPATH={root} exec {sys.executable} -m {__name__} "{folder}" "$@"\n'
    )
    python.chmod(0o700)
    return folder


def main() -> None:
    """Note the call in the environment's folder, and serve."""
    folder, *arguments = sys.argv[1:]
    note = {"arguments": arguments, "environment": dict(os.environ), "pid": os.getpid(), "parent": os.getppid()}
    Path(folder, f"{os.getpid()}.json").write_text(json.dumps(note))
    flags = dict(pairwise(arguments))
    model = Path(arguments[arguments.index("serve") + 1])
    vectors = [Path(path) for path in os.environ["HELMSIGHT_VECTORS"].split(os.pathsep)]
    answers = PlainAnswers(model, vectors, load_without_weights(Settings(model=str(model))))
    facts = facts_of(answers, slots=int(flags["--max-num-seqs"]))
    server = FakeVllm(answers.answer, facts, key=os.environ["VLLM_API_KEY"], port=int(flags["--port"]))
    server.server.serve_forever()


if __name__ == "__main__":
    main()
