"""What the journal's rows say together: `sample` copies those that it is about, `periods` tells of them over time, `whole`
of everything."""

from server.journal.summary.whole import summarise

__all__ = ["summarise"]
