"""Indexes for finding an answer by its id, and for reading and pruning by time."""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Create the indexes."""
    op.create_index("helmsight_journal_id", "helmsight_journal", ["id"])
    op.create_index("helmsight_journal_created", "helmsight_journal", ["created"])
