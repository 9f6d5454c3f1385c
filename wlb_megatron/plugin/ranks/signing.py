"""Notes that only the ranks of this job can have written."""

from __future__ import annotations

import hashlib
import hmac

SIZE = 32
"""Bytes of a signature."""


class Signer:
    """Signs notes with a secret that all ranks share, each for its place: a note is not valid in another's place."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def sign(self, place: str, note: bytes) -> bytes:
        """The note with its signature before it."""
        return self._signature(place, note) + note

    def read(self, place: str, signed: bytes) -> bytes | None:
        """The note, or None where its signature is not that of the place."""
        signature, note = signed[:SIZE], signed[SIZE:]
        return note if hmac.compare_digest(signature, self._signature(place, note)) else None

    def _signature(self, place: str, note: bytes) -> bytes:
        return hmac.digest(self._secret, hashlib.sha256(place.encode()).digest() + note, "sha256")
