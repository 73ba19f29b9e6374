"""Stored completions, and the columns of rows that `schema.ADDED` lists for this revision."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from server.journal.schema import ADDED

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Create the table and add the columns."""
    for column in ADDED[revision]:
        op.add_column("helmsight_journal", sa.Column(column.name, column.type))
    op.create_table(
        "helmsight_journal_stored",
        sa.Column("key", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), primary_key=True, autoincrement=True),
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("created", sa.Double, nullable=False),
        sa.Column("owner", sa.String(128), nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("metadata", sa.Text),
        sa.Column("messages", sa.Text, nullable=False),
        sa.Column("completion", sa.Text, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("helmsight_journal_stored_id", "helmsight_journal_stored", ["id"], unique=True)
    op.create_index("helmsight_journal_stored_created", "helmsight_journal_stored", ["created"])
