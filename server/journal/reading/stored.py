"""Stored completions: reading, changing and deleting those of one owner."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, RowMapping, and_, select, update

from server.journal.bounded import encoded_metadata
from server.journal.reading.queries import has_metadata
from server.journal.schema import ROWS, STORED
from server.wire.storing.metadata import truth

_DELETED = {"metadata": None, "messages": "[]", "completion": ""}
"""The columns of a deleted completion, whose place in the list stays known to clients that page through it."""


@dataclass(frozen=True)
class Chosen:
    """The completions to list: those of an owner whose ids have a prefix, and that have a model and pairs of metadata."""

    owner: str
    prefix: str = ""
    model: str | None = None
    metadata: tuple[tuple[str, str], ...] = ()

    def where(self) -> ColumnElement[bool]:
        """Return the SQL condition."""
        stored = STORED.c
        terms = [
            stored.owner == self.owner,
            stored.completion != "",
            stored.id.startswith(self.prefix, autoescape=True),
        ]
        if self.model is not None:
            terms.append(stored.model == self.model)
        return and_(*terms, *(has_metadata(stored.metadata, key, value) for key, value in self.metadata))


def find(connection: Connection, owner: str, identity: str) -> RowMapping | None:
    """Return the columns of an owner's completion, None if there is none."""
    chosen = select(STORED).where(Chosen(owner).where(), STORED.c.id == identity)
    return connection.execute(chosen).mappings().first()


def page(
    connection: Connection, chosen: Chosen, limit: int, after: str | None, newest_first: bool
) -> tuple[list[RowMapping], bool]:
    """Return at most `limit` completions after the one of that id, and whether there are more.

    Raises KeyError for an unknown `after`.
    """
    key = STORED.c.key
    listed = select(STORED).where(chosen.where()).order_by(key.desc() if newest_first else key).limit(limit + 1)
    if after is not None:
        key_query = select(key).where(STORED.c.owner == chosen.owner, STORED.c.id == after)
        if (place := connection.execute(key_query).scalar()) is None:
            raise KeyError(after)
        listed = listed.where(key < place if newest_first else key > place)
    rows = connection.execute(listed).mappings().all()
    return list(rows[:limit]), len(rows) > limit


def shown(row: RowMapping) -> dict[str, Any]:
    """Return a completion as it was sent, and its metadata as they are now."""
    return {**json.loads(row["completion"]), "metadata": json.loads(row["metadata"] or "{}")}


def messages(row: RowMapping) -> list[dict[str, Any]]:
    """Return the messages of a completion's request, each with an id."""
    entries: Iterable[dict[str, Any]] = json.loads(row["messages"])
    return [{"id": f"{row['id']}-{number}", **message} for number, message in enumerate(entries)]


def change(connection: Connection, owner: str, identity: str, metadata: dict[str, str] | None) -> RowMapping | None:
    """Replace the metadata of an owner's completion and of its rows; return the completion, None if there is none."""
    if find(connection, owner, identity) is None:
        return None
    text = None if metadata is None else encoded_metadata(metadata)
    connection.execute(update(STORED).where(STORED.c.id == identity).values(metadata=text))
    right = truth(metadata, "answer_correct")
    connection.execute(update(ROWS).where(ROWS.c.id == identity).values(metadata=text, answer_correct=right))
    return find(connection, owner, identity)


def mentioned(connection: Connection, text: str) -> bool:
    """Return whether the messages of any stored completion contain a text."""
    within = select(STORED.c.key).where(STORED.c.messages.contains(text, autoescape=True)).limit(1)
    return connection.execute(within).first() is not None


def remove(connection: Connection, owner: str, identity: str) -> bool:
    """Delete the texts and metadata of an owner's completion, also from its rows; return whether there was one."""
    if find(connection, owner, identity) is None:
        return False
    connection.execute(update(STORED).where(STORED.c.id == identity).values(**_DELETED))
    texts = dict.fromkeys(("prompt", "answer", "metadata"))
    connection.execute(update(ROWS).where(ROWS.c.id == identity).values(**texts))
    return True
