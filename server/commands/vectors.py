"""`helmsight vectors`: build, list, show, compose, export and import vectors without a server.

All but build work without loading a model.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, BadParameter, Option

from demo import located
from probes.commands.pairs import build
from probes.harness.loading.flags import model_flags
from probes.harness.options import Command, check_file, hide_bars, with_flags
from server.commands.options import Config, settings_of, show

if TYPE_CHECKING:
    from server.vectors.registry import Registry
    from steering import SteeringVector, VectorStore

FINGERPRINT = re.compile(r"[0-9a-f]{32}")

Model = Annotated[str | None, Option(help="checkpoint folder whose vectors to include")]
Folders = Annotated[
    list[str] | None,
    Option(
        "--folder", "--vectors", metavar="FOLDER",
        help="folder of vectors (repeatable; default: the configured ones)",
    ),
]  # fmt: skip
Replace = Annotated[bool, Option("--replace", help="overwrite an existing one")]
Name = Annotated[str, Argument(help="name of the vector")]

app = typer.Typer(no_args_is_help=True)
app.command("build", cls=Command, short_help="build a vector from pairs of prompts, or a condition from examples")(
    with_flags(build, model_flags())
)


def register(to: typer.Typer) -> None:
    """Add the `vectors` command with its parts."""
    to.add_typer(app, name="vectors")


@app.command("list", cls=Command)
def list_vectors(config: Config = None, model: Model = None, vectors: Folders = None) -> None:
    """Show all vectors that a server with these settings would offer.

    A server uses the first file of a name that was made for its model; a damaged one hides the rest. Sparse dictionaries
    come last.
    """
    from steering import SteeringVector, VectorError
    from steering.vectors.candidates import CANDIDATES

    store, _ = _open(config, model, vectors, reading=True)
    rows: list[tuple[str | None, ...]] = []
    for name in store.names():
        hidden_by: set[str] = set()
        for path in dict.fromkeys(store.files(name)):  # a folder may be named twice
            try:
                vector = SteeringVector.load(path)
            except (VectorError, OSError) as error:
                hidden_by.add("damaged")
                rows.append((name, "no", *[None] * 5, f"{path.parent}: {error}"))
                continue
            used = "no" if hidden_by & {"damaged", vector.fingerprint} else "yes"
            hidden_by.add(vector.fingerprint)
            rows.append((name, used, *_columns(vector), str(path.parent)))
    for path in sorted(
        path for folder in dict.fromkeys(store.folders) for path in (folder / CANDIDATES).glob("*.safetensors")
    ):
        with suppress(VectorError, OSError):
            rows.append((path.stem, "candidate", *_columns(SteeringVector.load(path)), str(path.parent)))
    for name in store.dictionaries(every=True):
        try:
            dictionary = store.dictionary(name)
        except (VectorError, OSError) as error:
            rows.append((f"sae:{name}/", "no", "sae-dictionary", *[None] * 4, str(error)))
            continue
        names = f"sae:{name}/0 to {dictionary.features - 1}"
        folder = str(Path(dictionary.folder).parent)
        rows.append((names, "yes", "sae-dictionary", str(dictionary.layer), None, None, dictionary.model, folder))
    show(("NAME", "USED", "KIND", "LAYERS", "PUBLISHED", "CALIBRATED", "MODEL", "FOLDER"), rows)


@app.command("use", cls=Command, short_help="let a name stand for its candidate, which a probe has built")
def use_candidate(
    name: Name,
    dry_run: Annotated[bool, Option("--dry-run", help="only compare the two")] = False,
    config: Config = None,
    model: Model = None,
    vectors: Folders = None,
) -> None:
    """Compare the vector that a name stands for with its candidate, and let the name stand for the candidate.

    Running servers take it at their next lookup, and log both digests.
    """
    from steering import VectorError, VectorStore
    from steering.vectors.candidates import aligned, load_candidate, side_by_side, undoing, use

    store, _ = _open(config, model, vectors, reading=True)
    if not store.folders:
        raise ValueError("there is no folder of vectors: give --folder")
    folder = store.folders[0]
    candidate = load_candidate(folder, name)
    try:
        current = VectorStore(*store.folders, fingerprint=candidate.fingerprint).get(name)
    except VectorError:
        current = None
    if current is not None and current.fingerprint != candidate.fingerprint:
        current = None
    print("\n".join(aligned([("", "in use", "candidate"), *side_by_side(current, candidate)])))
    for warning in (*candidate.info.get("doubts", ()), *candidate.info.get("warnings", ())):
        print(f"WARNING: {warning}")
    if dry_run:
        return
    backup = use(folder, name)
    before = "none" if current is None else current.identity
    print(f"{name} changed: digest {before} before, {candidate.identity} now")
    print(undoing(folder / f"{name}.safetensors", backup))


def _columns(vector: SteeringVector) -> tuple[str | None, ...]:
    """Return kind, layers, strength 1 in published units, the calibrated range of strengths, and the model."""
    published, strengths = vector.published, vector.calibrated_range
    kind = vector.kind if vector.positive in ("text", None) else f"{vector.kind}, negated"
    return (
        f"{kind}, + {vector.info['sides'][0]}" if "sides" in vector.info else kind,
        ",".join(map(str, vector.layers)),
        None if published is None else f"{published:g}",
        None if strengths is None else f"{strengths[0]:g} to {strengths[1]:g}",
        vector.fingerprint[:16],
    )


@app.command("show", cls=Command)
def show_vector(name: Name, config: Config = None, model: Model = None, vectors: Folders = None) -> None:
    """Show a vector as JSON, including how it was made."""
    from server.api.vectors import vector_json

    store, _ = _open(config, model, vectors, reading=True)
    print(json.dumps(vector_json(store.get(name)), indent=2, ensure_ascii=False))


@app.command(cls=Command, short_help="add scaled vectors up to a new one")
def compose(
    out: Annotated[str, Argument(metavar="OUT", help="name of the sum, which is written to the first folder")],
    add: Annotated[list[str], Option(metavar="NAME[:SCALE]...", help="a vector and its scale (default 1)")],
    replace: Replace = False,
    config: Config = None,
    model: Model = None,
    vectors: Folders = None,
) -> None:
    """Add vectors of one model, each times a scale, and store the sum under a new name."""
    terms = [_term(text) for text in add]
    store, registry = _open(config, model, vectors)
    # A vector that is only renamed keeps its calibration.
    parts = [store.get(name) if scale == 1 else scale * store.get(name) for name, scale in terms]
    total = functools.reduce(lambda first, other: first + other, parts).named(out)
    if not total.delta(1.0).any():
        raise ValueError(f"--add {' '.join(add)} adds up to zero; change the scales")
    _add(store, registry(), total, replace)


@app.command(cls=Command, short_help="write a vector to a file: safetensors, or GGUF if FILE ends in .gguf")
def export(
    name: Name,
    file: Annotated[Path, Argument(metavar="FILE", help="file to write")],
    model_hint: Annotated[
        str, Option(metavar="ARCH", help="name of the model's architecture in llama.cpp, for GGUF")
    ] = "unknown",
    replace: Replace = False,
    config: Config = None,
    model: Model = None,
    vectors: Folders = None,
) -> None:
    """Write a vector to a file for use elsewhere: safetensors, or GGUF if FILE ends in .gguf."""
    from steering.files import write_atomically
    from steering.vectors.gguf import to_gguf

    store, _ = _open(config, model, vectors, reading=True)
    check_file(file)
    data = to_gguf(store.get(name), model_hint) if file.suffix == ".gguf" else store.read(name)
    if file.exists() and not replace:
        raise FileExistsError(f"{file} already exists; --replace overwrites it")
    write_atomically(file, data)
    print(f"{file}: {len(data)} bytes")


@app.command("import", cls=Command, short_help="import a vector file into the first folder")
def import_vector(
    file: Annotated[Path, Argument(metavar="FILE", help="file to read")],
    name: Annotated[str | None, Option(help="name of the vector (default: its own; for GGUF that of the file)")] = None,
    fingerprint: Annotated[
        str | None, Option(help="fingerprint of the model that a GGUF file was made for; see 'vectors show'")
    ] = None,
    replace: Replace = False,
    config: Config = None,
    model: Model = None,
    vectors: Folders = None,
) -> None:
    """Check a safetensors file, or a GGUF control vector, and put it into the first folder.

    A GGUF file does not say which model it was made for: give --fingerprint, or --model, which is loaded to find out.
    """
    from steering import SteeringVector, VectorError

    store, registry = _open(config, model, vectors)
    if _is_gguf(file):
        named = file.stem if name is None else name
        vector = _from_gguf(file, named, fingerprint, None if model is None else located(model), store)
    else:
        try:
            vector = SteeringVector.load(file)
        except VectorError as error:
            raise ValueError(f"{file}: {error}") from error
        if name is not None:
            vector = vector.named(name)
    _add(store, registry(), vector, replace)


def _from_gguf(path: Path, name: str, fingerprint: str | None, model: str | None, store: VectorStore) -> SteeringVector:
    from steering.vectors.gguf import from_gguf

    if fingerprint is not None:
        if not FINGERPRINT.fullmatch(fingerprint):
            raise ValueError("--fingerprint must be 32 hexadecimal digits, as 'helmsight vectors show' prints it")
        return from_gguf(path, name, fingerprint, _layers_of(fingerprint, store))
    if model is None:
        raise ValueError(f"{path} is a GGUF file, which does not name its model: give --fingerprint or --model")
    import steering

    from_gguf(path, name, "0" * 32)  # reports errors of the file before the model is loaded
    # The fingerprint is the same in every dtype, and this one takes half the memory.
    with hide_bars():
        mllm = steering.load(model, device="cpu", dtype="bfloat16")
    vector = from_gguf(path, name, mllm.fingerprint, mllm.num_layers)
    steering.check_steer(mllm, steering.Steer(vector, 1.0))
    return vector


def _layers_of(fingerprint: str, store: VectorStore) -> int | None:
    """Return the number of layers of a model, if another vector of it is known."""
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
        begins = file.read(4) == b"GGUF"
    if path.suffix == ".gguf" and not begins:
        raise ValueError(f"{path}: it is not a GGUF file, or a damaged one: it does not begin with GGUF")
    return begins


def _add(store: VectorStore, registry: Registry, vector: SteeringVector, replace: bool) -> None:
    """Write a vector to the first folder.

    Raises FileExistsError if its name stands for another vector, of the first folder or of the same model in another one,
    unless `replace`.
    """
    place = registry.folder / f"{vector.name}.safetensors"
    if not replace and place.exists():
        raise FileExistsError(f"{place} already exists; --replace overwrites it")
    if not replace and (other := _hidden_by(vector, place, store)) is not None:
        raise FileExistsError(
            f"{vector.name!r} already stands for {other}, of the same model; --replace writes {place}, which hides that one"
        )
    path = registry.add(vector, replace)
    layers = ", ".join(map(str, vector.layers))
    print(f"{path}: {vector.name}, {vector.kind}, layers {layers}, model {vector.fingerprint[:16]}")


def _hidden_by(vector: SteeringVector, place: Path, store: VectorStore) -> Path | None:
    """Return the file in another folder for which the name stands now, of the same model; None if there is none."""
    from steering import SteeringVector, VectorError

    for path in store.files(vector.name):
        with suppress(VectorError, OSError):
            if path != place and SteeringVector.load(path).fingerprint == vector.fingerprint:
                return path
    return None


def _open(
    config: str | None, model: str | None, vectors: list[str] | None, reading: bool = False
) -> tuple[VectorStore, Callable[[], Registry]]:
    """Return all vectors of the settings, and a function that opens the writable folder.

    Raises ValueError for a missing folder that was named for `reading`.
    """
    from server.engine.runtime import vector_store
    from server.vectors.registry import Registry

    settings = settings_of(config, model=model, vectors=vectors)
    for option, folder in (("--model", model), *(("--folder", text) for text in vectors or ())):
        if reading and folder is not None and not Path(located(folder)).expanduser().is_dir():
            raise ValueError(f"{option} {folder}: there is no such folder")
    store = vector_store(settings, Path(settings.model))

    def registry() -> Registry:
        if not settings.vectors:
            raise ValueError("there is no folder to import it into: give --folder")
        return Registry(store.folders[0])

    return store, registry


def _term(text: str) -> tuple[str, float]:
    name, colon, scale = text.partition(":")
    try:
        return name, float(scale) if colon else 1.0
    except ValueError:
        raise BadParameter(f"--add {text!r}: write NAME or NAME:SCALE, with a number for the scale") from None
