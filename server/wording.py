"""Text for logs and error messages.

It imports nothing, so that checks before a start stay quick.
"""

from __future__ import annotations


def one_sentence(error: BaseException) -> str:
    """Return the first paragraph of an error's message on one line; libraries append advice about their own options."""
    message = " ".join(str(error).strip().partition("\n\n")[0].split())
    return message[:400] or type(error).__name__
