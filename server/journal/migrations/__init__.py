"""The journal's migrations, run by alembic when a journal is opened."""
