"""Counts of refused requests, minute by minute."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Create the table."""
    op.create_table(
        "helmsight_journal_refusals",
        sa.Column("minute", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("status", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("code", sa.String(64), primary_key=True),
        sa.Column("route", sa.String(64), primary_key=True),
        sa.Column("count", sa.Integer, nullable=False),
    )
