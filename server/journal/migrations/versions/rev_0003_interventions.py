"""A column of intervention names, so that new ones need no column of their own, and one of further readout numbers."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

JOURNAL = sa.table(
    "helmsight_journal",
    *(sa.column(name, sa.Boolean) for name in ("sage_see", "sage_think", "sage_generate")),
    *(sa.column(name, sa.Text) for name in ("vectors", "contrast", "interventions")),
)


def upgrade() -> None:
    """Add the columns and fill in the names of existing rows."""
    # The default is for existing rows, and for those of an older server that runs beside this one.
    column = sa.Column("interventions", sa.Text, nullable=False, server_default="|")
    op.add_column("helmsight_journal", column)
    op.add_column("helmsight_journal", sa.Column("readouts", sa.Text))
    row = JOURNAL.c
    conditions = {
        "steering": row.vectors != "|",
        "sage.see": row.sage_see.is_(True),
        "sage.think": row.sage_think.is_(True),
        "sage.generate": row.sage_generate.is_(True),
    }
    names: sa.ColumnElement[str] = sa.literal("|")
    for name, condition in conditions.items():
        names += sa.case((condition, f"{name}|"), else_="")
    contrasted = row.contrast != "none"
    names += sa.case((contrasted, sa.literal("contrast.") + row.contrast + "|"), else_="")
    op.execute(sa.update(JOURNAL).where(sa.or_(*conditions.values(), contrasted)).values(interventions=names))
