"""The journal's migrations, which alembic runs when a journal is opened."""
