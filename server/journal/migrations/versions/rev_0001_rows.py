"""The table of rows."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Create the table."""
    op.create_table(
        "helmsight_journal",
        sa.Column("key", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), primary_key=True, autoincrement=True),
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("choice", sa.Integer, nullable=False),
        sa.Column("created", sa.Double, nullable=False),
        sa.Column("hour", sa.Integer, nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("finish_reason", sa.String(16), nullable=False),
        sa.Column("streamed", sa.Boolean, nullable=False),
        sa.Column("intervention", sa.String(64), nullable=False),
        sa.Column("toward", sa.String(16), nullable=False),
        sa.Column("sage_see", sa.Boolean, nullable=False),
        sa.Column("sage_think", sa.Boolean, nullable=False),
        sa.Column("sage_generate", sa.Boolean, nullable=False),
        sa.Column("contrast", sa.String(16), nullable=False),
        sa.Column("vectors", sa.Text, nullable=False),
        sa.Column("prompt_tokens", sa.Integer),
        sa.Column("completion_tokens", sa.Integer),
        sa.Column("images", sa.Integer, nullable=False),
        sa.Column("first_token", sa.Double),
        sa.Column("total", sa.Double, nullable=False),
        sa.Column("attention_ratio", sa.Double),
        sa.Column("focused_image", sa.Integer),
        sa.Column("focus_share", sa.Double),
        sa.Column("target_image", sa.Integer),
        sa.Column("correct", sa.Boolean),
        sa.Column("decay_slope", sa.Double),
        sa.Column("kl", sa.Double),
        sa.Column("perceptual_blindness", sa.Boolean),
        sa.Column("dissociation", sa.Boolean),
        sa.Column("dose", sa.Double),
        sa.Column("answer_correct", sa.Boolean),
        sa.Column("sampling", sa.Text, nullable=False),
        sa.Column("asked", sa.Text, nullable=False),
        sa.Column("applied", sa.Text),
        sa.Column("metadata", sa.Text),
        sa.Column("prompt", sa.Text),
        sa.Column("answer", sa.Text),
        sqlite_autoincrement=True,
    )
