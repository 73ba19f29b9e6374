"""Rows as Parquet (the extra `parquet`), with the fields of every other form and a type for each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from typing import IO, TYPE_CHECKING, Any

from server.journal.reading.fields import SAMPLING, columns, flat
from server.journal.schema import ROWS

if TYPE_CHECKING:
    import pyarrow


def check_parquet(terminal: bool = False) -> None:
    """Raise ValueError if Parquet cannot be written, or would be written to a terminal."""
    if find_spec("pyarrow") is None:
        raise ValueError("Parquet needs pyarrow: pip install 'helmsight[parquet]'")
    if terminal:
        raise ValueError("Parquet is not for a terminal: write it to a file, as with > answers.parquet")


def write_parquet(file: IO[bytes], chunks: Iterable[list[dict[str, Any]]]) -> None:
    """Write shown rows, chunk by chunk."""
    from pyarrow import RecordBatch, parquet  # noqa: PLC0415 -- an extra

    schema = _schema()
    with parquet.ParquetWriter(file, schema) as writer:
        for rows in chunks:
            named = [{name: row.get(name) for name in schema.names} for row in map(flat, rows)]
            writer.write_batch(RecordBatch.from_pylist(named, schema))


def _schema() -> pyarrow.Schema:
    """Return the names and types of all fields."""
    import pyarrow  # noqa: PLC0415 -- an extra

    from server.journal.reading.view import scalars  # noqa: PLC0415 -- a table of these names is read without torch

    types = {str: pyarrow.string(), bool: pyarrow.bool_(), int: pyarrow.int64(), float: pyarrow.float64()}

    def kinds() -> Iterator[tuple[str, type]]:
        scalar_types = scalars()
        for name in columns(scalar_types):
            kind = scalar_types.get(name) or SAMPLING.get(name)
            yield name, kind or ROWS.c[name].type.python_type

    return pyarrow.schema([(name, types[kind]) for name, kind in kinds()])
