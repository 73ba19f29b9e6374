"""The process that computes the references of a model: `python -m steering.vllm FILE`, with its task on standard input."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from steering.files import write_atomically
from steering.messages import serialization
from steering.vllm.reference import REFERENCE_KINDS, ReferenceTask, compute

if __name__ == "__main__":
    reference = compute(ReferenceTask(**json.loads(sys.stdin.read())))
    write_atomically(Path(sys.argv[1]), serialization.written(reference, REFERENCE_KINDS))
