"""The journal's tables: rows, stored completions, and counts of refused requests.

In rows, filtered and averaged values have columns of their own, and the rest is JSON as text. A further column of rows is
one line in `ADDED`: the migration adds it, and every form of a row shows it under its name.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, Boolean, Column, Double, Index, Integer, MetaData, String, Table, Text

VERSION_TABLE = "helmsight_journal_version"
"""The table of alembic's revision, renamed because a PostgreSQL database may be shared."""

metadata = MetaData()

# Rows are ordered by their keys, which only grow and are never reused, since clocks jump.
key_type = BigInteger().with_variant(Integer(), "sqlite")

ADDED: dict[str, tuple[Column[Any], ...]] = {
    "0006": (
        Column("request_id", String(128), doc="The id of the request, which log lines have, too."),
        Column("trace_id", String(32), doc="The id of the request's trace (W3C), if it has one."),
        Column("span_id", String(16), doc="The id of the request's span, if traces are sent."),
        Column("preset", String(64), doc="The requested preset."),
        Column("source", String(16), doc="The source of the request; null in rows of an older server."),
    ),
    "0007": (
        Column("guard", String(16), doc="The outcome of the request's guard; null without one."),
        Column("calibration", String(64), doc="The digest of the calibration that the answer was computed under."),
        Column("digests", Text),  # |name@digest|name@digest|, of the steering vectors
    ),
}
"""Columns that were added later, by the revision that adds them; all may be null. `doc` is the API's description."""

ROWS = Table(
    "helmsight_journal",
    metadata,
    Column("key", key_type, primary_key=True, autoincrement=True),
    Column("id", String(64), nullable=False),
    Column("choice", Integer, nullable=False),
    Column("created", Double, nullable=False),  # Unix time when the request was accepted
    Column("hour", Integer, nullable=False),  # created // 3600, since databases round differently
    Column("model", Text, nullable=False),
    Column("finish_reason", String(16), nullable=False),
    Column("streamed", Boolean, nullable=False),
    Column("intervention", String(64), nullable=False),  # as the summary names it
    Column("toward", String(16), nullable=False),
    Column("sage_see", Boolean, nullable=False),
    Column("sage_think", Boolean, nullable=False),
    Column("sage_generate", Boolean, nullable=False),
    Column("contrast", String(16), nullable=False),
    Column("vectors", Text, nullable=False),  # |name|name|
    Column("prompt_tokens", Integer),
    Column("completion_tokens", Integer),
    Column("images", Integer, nullable=False),
    Column("first_token", Double),  # seconds since the request arrived
    Column("total", Double, nullable=False),
    Column("attention_ratio", Double),
    Column("focused_image", Integer),
    Column("focus_share", Double),
    Column("target_image", Integer),
    Column("correct", Boolean),
    Column("decay_slope", Double),
    Column("kl", Double),
    Column("perceptual_blindness", Boolean),
    Column("dissociation", Boolean),
    Column("dose", Double),
    Column("answer_correct", Boolean),
    # Wide columns come last, so that a scan over the others does not follow them to further pages.
    Column("sampling", Text, nullable=False),
    Column("asked", Text, nullable=False),
    Column("applied", Text),
    Column("metadata", Text),
    Column("prompt", Text),
    Column("answer", Text),
    # These are last only because a table grows at its end.
    Column("interventions", Text, nullable=False, server_default="|"),  # |name|name|, as the registry names them
    Column("readouts", Text),  # the scalars of readouts that have no column of their own, as JSON
    Column("key_name", String(64)),  # null for keys without a name
    *(column for columns in ADDED.values() for column in columns),
    Index("helmsight_journal_id", "id"),
    Index("helmsight_journal_created", "created"),
    sqlite_autoincrement=True,
)

STORED = Table(
    "helmsight_journal_stored",
    metadata,
    Column("key", key_type, primary_key=True, autoincrement=True),
    Column("id", String(64), nullable=False),
    Column("created", Double, nullable=False),  # Unix time when the request was accepted
    Column("owner", String(128), nullable=False),  # who may see it: `Holder.owner`
    Column("model", Text, nullable=False),  # as the answer names it
    Column("metadata", Text),
    Column("messages", Text, nullable=False),  # those of the request, as JSON, without images
    Column("completion", Text, nullable=False),  # the answer as it was sent, as JSON
    Index("helmsight_journal_stored_id", "id", unique=True),
    Index("helmsight_journal_stored_created", "created"),
    sqlite_autoincrement=True,
)
"""Completions that their requests asked to store, with their texts."""

REFUSALS = Table(
    "helmsight_journal_refusals",
    metadata,
    Column("minute", Integer, primary_key=True, autoincrement=False),  # Unix time // 60
    Column("status", Integer, primary_key=True, autoincrement=False),
    Column("code", String(64), primary_key=True),
    Column("route", String(64), primary_key=True),
    Column("count", Integer, nullable=False),
)

DIAGNOSTICS = (
    "attention_ratio",
    "focused_image",
    "focus_share",
    "target_image",
    "correct",
    "decay_slope",
    "kl",
    "perceptual_blindness",
    "dissociation",
    "dose",
)
"""The scalar diagnostics that have columns of their own, in the order in which a row shows them."""

FLAGS = ("perceptual_blindness", "dissociation")
