"""The columns of rows that `schema.ADDED` lists for this revision: what an answer's vectors and calibration were."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from server.journal.schema import ADDED

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    """Add the columns."""
    for column in ADDED[revision]:
        op.add_column("helmsight_journal", sa.Column(column.name, column.type))
