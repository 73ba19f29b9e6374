"""The journal: one row for each answer, in SQLite or PostgreSQL, written behind the server's back and kept bounded.

The life of a row: `entry` makes it where an answer ends, `writer` commits it in the background to what `database` opened,
`retention` deletes it in the end; `queries`, `summary` and `routes` show it meanwhile, and so does `command`.
"""
