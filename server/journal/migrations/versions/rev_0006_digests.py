"""The digests of an answer's steering vectors, and that of the calibration under which it was computed."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Add the columns."""
    op.add_column("helmsight_journal", sa.Column("digests", sa.Text))
    op.add_column("helmsight_journal", sa.Column("calibration", sa.String(64)))
