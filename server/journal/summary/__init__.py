"""The summary of the journal's rows.

`sample` copies the rows concerned, `periods` summarises them over time, and `whole` combines everything.
"""

from server.journal.summary.whole import summarise

__all__ = ["summarise"]
