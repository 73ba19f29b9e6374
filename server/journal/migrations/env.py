"""The script that alembic runs to migrate a journal; `server.journal.database` supplies connection and transaction."""

from __future__ import annotations

from alembic import context

from server.journal.schema import VERSION_TABLE, metadata

context.configure(
    connection=context.config.attributes["connection"], target_metadata=metadata, version_table=VERSION_TABLE
)
with context.begin_transaction():
    context.run_migrations()
