"""The name of the key of an answer's request."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Add the column."""
    op.add_column("helmsight_journal", sa.Column("key_name", sa.String(64)))
