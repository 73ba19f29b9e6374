"""Base64 in the forms in which clients write it."""

from __future__ import annotations

_ESCAPES = [
    (escape, byte)
    for byte in (b"+", b"/", b"=", b"-", b"_", b"\n", b"\r", b" ")
    for escape in {f"%{byte[0]:02X}".encode(), f"%{byte[0]:02x}".encode()}
]
"""Percent-encodings of base64's characters other than letters and digits, and of white space."""
_SPACES = b" \t\r\n\f"
_UNUSUAL = [*_SPACES, *b"-_"]
_URL_SAFE = bytes.maketrans(b"-_", b"+/")


def plain_base64(text: str) -> bytes:
    """Return padded base64 in its plain alphabet from any of the forms that clients write.

    These are base64 in lines, percent-encoded, URL-safe or unpadded. Raises ValueError for characters outside of ASCII.
    """
    encoded = text.encode("ascii")
    if b"%" in encoded:
        for escape, byte in _ESCAPES:
            encoded = encoded.replace(escape, byte)
    if any(byte in encoded for byte in _UNUSUAL):  # translating megabytes takes longer than looking
        encoded = encoded.translate(_URL_SAFE, _SPACES)
    return encoded if b"=" in encoded[-2:] else encoded + b"=" * (-len(encoded) % 4)
