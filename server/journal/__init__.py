"""The journal: a row for each answer, in SQLite or PostgreSQL, written in the background and bounded in size.

The life of a row: `entry` makes it at the end of an answer, `writer` commits it in the background to the database that
`database` opened, and `retention` finally deletes it; meanwhile `queries`, `summary` and `routes` show it, as does
`command`.
"""
