"""`helmsight vectors`: list, show, compose, export and import, without a server and without loading a model."""

from __future__ import annotations

import argparse
import functools
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from server import settings as server_settings

if TYPE_CHECKING:
    from server.vectors.registry import Registry
    from steering import SteeringVector, VectorStore

FINGERPRINT = re.compile(r"[0-9a-f]{32}")


def register(subparsers: argparse._SubParsersAction) -> None:
    """Add the `vectors` command; each part sets `func`, called with the parsed arguments."""
    vectors = subparsers.add_parser("vectors", help="list, show, compose, export and import steering vectors")
    parts = vectors.add_subparsers(title="commands", required=True, metavar="COMMAND")

    part = parts.add_parser("list", help="all vectors that a server with these settings would offer")
    part.set_defaults(func=_guarded(list_vectors))

    part = parts.add_parser("show", help="one vector, with how it was made, as JSON")
    part.add_argument("name", help="name of the vector")
    part.set_defaults(func=_guarded(show))

    part = parts.add_parser(
        "compose",
        help="add scaled vectors up to a new one",
        description="Add vectors of one model, each times a scale, and keep the sum under a new name.",
    )
    part.add_argument("out", metavar="OUT", help="name of the sum, which goes into the first folder")
    part.add_argument(
        "--add", nargs="+", action="extend", required=True, type=_term, metavar="NAME[:SCALE]",
        help="a vector and its scale (default 1)",
    )  # fmt: skip
    _add_replace(part)
    part.set_defaults(func=_guarded(compose))

    part = parts.add_parser("export", help="write a vector to a file: safetensors, or GGUF where FILE ends in .gguf")
    part.add_argument("name", help="name of the vector")
    part.add_argument("file", metavar="FILE", help="where to")
    part.add_argument(
        "--model-hint", default="unknown", metavar="ARCH",
        help="name of the model's architecture in llama.cpp, for GGUF (default: %(default)s)",
    )  # fmt: skip
    _add_replace(part)
    part.set_defaults(func=_guarded(export))

    part = parts.add_parser(
        "import",
        help="put a file's vector into the first folder",
        description="Check a safetensors file, or a GGUF control vector, and put it into the first folder. A GGUF file "
        "does not say which model it was made for: give --fingerprint, or --model, which is loaded to find out.",
    )
    part.add_argument("file", metavar="FILE", help="where from")
    part.add_argument("--name", help="name of the vector (default: its own; for GGUF that of the file)")
    part.add_argument("--fingerprint", help="that of the model which a GGUF file was made for; see 'vectors show'")
    _add_replace(part)
    part.set_defaults(func=_guarded(import_vector))

    for part in parts.choices.values():
        part.add_argument("--config", metavar="FILE", help="TOML file with settings")
        part.add_argument("--model", default=argparse.SUPPRESS, help="checkpoint folder whose vectors to include")
        part.add_argument(
            "--folder", "--vectors", dest="vectors", action="append", default=argparse.SUPPRESS, metavar="FOLDER",
            help="folder of vectors (repeatable; default: those of the settings)",
        )  # fmt: skip


def list_vectors(arguments: argparse.Namespace) -> None:
    """One line a file. A server takes the first one of a name that was made for its model; a damaged one hides the rest."""
    from steering import SteeringVector, VectorError

    store, _ = _open(arguments)
    rows: list[tuple[str, ...]] = [("NAME", "USED", "KIND", "LAYERS", "PUBLISHED", "CALIBRATED", "MODEL", "FOLDER")]
    for name in store.names():
        seen: set[str] = set()
        for path in dict.fromkeys(store.files(name)):  # a folder may be named twice
            try:
                vector = SteeringVector.load(path)
            except (VectorError, OSError) as error:
                seen.add("damaged")
                rows.append((name, "no", f"{path.parent}: {error}"))
                continue
            used = "no" if seen & {"damaged", vector.fingerprint} else "yes"
            seen.add(vector.fingerprint)
            rows.append((name, used, *_columns(vector), str(path.parent)))
    # What is wrong with a file stands in place of the columns behind the second one, and does not widen them.
    widths = [max(len(row[i]) for row in rows if i < 2 or len(row) > 3) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(map(str.ljust, row, widths)).rstrip())


def _columns(vector: SteeringVector) -> tuple[str, str, str, str, str]:
    """Kind, layers, what strength 1 is in published units, the range of strengths that was calibrated, and the model."""
    published, known = vector.published, vector.calibrated_range
    kind = vector.kind if vector.positive in ("text", None) else f"{vector.kind}, negated"
    return (
        kind,
        ",".join(map(str, vector.layers)),
        "-" if published is None else f"{published:g}",
        "-" if known is None else f"{known[0]:g} to {known[1]:g}",
        vector.fingerprint[:16],
    )


def show(arguments: argparse.Namespace) -> None:
    """One vector without its numbers."""
    from server.vectors.routes import vector_json

    store, _ = _open(arguments)
    print(json.dumps(vector_json(store.get(arguments.name)), indent=2, ensure_ascii=False))


def compose(arguments: argparse.Namespace) -> None:
    """The sum of scaled vectors."""
    store, registry = _open(arguments)
    # A vector that is only renamed keeps its calibration.
    parts = [store.get(name) if scale == 1 else scale * store.get(name) for name, scale in arguments.add]
    _add(registry(), functools.reduce(lambda one, other: one + other, parts).named(arguments.out), arguments.replace)


def export(arguments: argparse.Namespace) -> None:
    """A file for elsewhere."""
    from steering.files import write_atomically
    from steering.vectors.gguf import to_gguf

    store, _ = _open(arguments)
    path = Path(arguments.file)
    gguf = path.suffix == ".gguf"
    data = to_gguf(store.get(arguments.name), arguments.model_hint) if gguf else store.read(arguments.name)
    if path.exists() and not arguments.replace:
        raise FileExistsError(f"{path} exists already; --replace writes over it")
    write_atomically(path, data)
    print(f"{path}: {len(data)} bytes")


def import_vector(arguments: argparse.Namespace) -> None:
    """A file from elsewhere."""
    from steering import SteeringVector

    store, registry = _open(arguments)
    path = Path(arguments.file)
    if _is_gguf(path):
        vector = _from_gguf(path, arguments, store)
    else:
        vector = SteeringVector.load(path)
        if arguments.name is not None:
            vector = vector.named(arguments.name)
    _add(registry(), vector, arguments.replace)


def _from_gguf(path: Path, arguments: argparse.Namespace, store: VectorStore) -> SteeringVector:
    from steering.vectors.gguf import from_gguf

    name = path.stem if arguments.name is None else arguments.name
    if arguments.fingerprint is not None:
        if not FINGERPRINT.fullmatch(arguments.fingerprint):
            raise ValueError("--fingerprint must be 32 hexadecimal digits, as 'helmsight vectors show' prints it")
        return from_gguf(path, name, arguments.fingerprint, _layers_of(arguments.fingerprint, store))
    if not hasattr(arguments, "model"):
        raise ValueError(
            f"{path} is a GGUF file, which does not say which model it was made for: give --fingerprint or --model"
        )
    import steering

    from_gguf(path, name, "0" * 32)  # what is wrong with the file is known sooner than the model is loaded
    # The fingerprint is the same in every dtype, and this one takes half the memory.
    mllm = steering.load(arguments.model, device="cpu", dtype="bfloat16")
    vector = from_gguf(path, name, mllm.fingerprint, mllm.num_layers)
    steering.check_steer(mllm, steering.Steer(vector, 1.0))
    return vector


def _layers_of(fingerprint: str, store: VectorStore) -> int | None:
    """How many layers a model has, where another vector of it is known."""
    from steering import VectorError

    for name in store.names():
        try:
            vector = store.get(name)
        except (VectorError, OSError):
            continue
        if vector.fingerprint == fingerprint:
            return len(vector.direction)
    return None


def _is_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def _add(registry: Registry, vector: SteeringVector, replace: bool) -> None:
    path = registry.add(vector, replace)
    layers = ", ".join(map(str, vector.layers))
    print(f"{path}: {vector.name}, {vector.kind}, layers {layers}, model {vector.fingerprint[:16]}")


def _open(arguments: argparse.Namespace) -> tuple[VectorStore, Callable[[], Registry]]:
    """All vectors of the settings, and what opens the folder that may be written to."""
    from server.process.runtime import vector_store
    from server.vectors.registry import Registry

    settings = server_settings.from_arguments(arguments)
    store = vector_store(settings, Path(settings.model))

    def registry() -> Registry:
        if not settings.vectors:
            raise ValueError("there is no folder to put it into: give --folder")
        first, *others = store.folders
        return Registry(first, [folder for folder in others if folder != first])

    return store, registry


def _term(text: str) -> tuple[str, float]:
    name, colon, scale = text.partition(":")
    return name, float(scale) if colon else 1.0


def _add_replace(part: argparse.ArgumentParser) -> None:
    part.add_argument("--replace", action="store_true", help="write over what is there")


def _guarded(command: Callable[[argparse.Namespace], None]) -> Callable[[argparse.Namespace], int]:
    """A command whose errors that a user can put right are one line on standard error and status 1."""

    def run(arguments: argparse.Namespace) -> int:
        from steering import SteeringError

        try:
            command(arguments)
        except (SteeringError, ValueError, OSError) as error:
            print(f"helmsight: {error}", file=sys.stderr)
            return 1
        return 0

    return run
