"""Keys of their own for the ranks of every start.

Note [Restarts]
torchrun keeps its store across restarts, and gloo would find the addresses of dead
processes in it. Each start therefore needs keys that no earlier one had. A count of
restarts does not do: when the number of nodes changes, agents restart their workers
without counting it, or count differently. So ranks meet: each says a random word, rank
0 answers with the words of all, and once every rank has confirmed the answer that its
own word is in, that answer is the name of this start. Words of the dead are in the
store too, but they confirm nothing.
"""

import hashlib
import secrets
import time
from typing import Any

POLL_SECONDS = 0.02
PREFIX = "natgrad/meeting"


def meet(store: Any, rank: int, size: int, timeout: float = 600.0) -> str:
    """A text that all ranks of this start get, and no other start."""
    word, end = secrets.token_hex(8), time.monotonic() + timeout
    store.set(f"{PREFIX}/word/{rank}", word)
    while time.monotonic() < end:
        if rank == 0:
            _answer(store, size)
        answer = _text(store, "answer")
        if word in answer.split():
            store.set(f"{PREFIX}/confirmed/{rank}", answer)
        agreed = _text(store, "agreed")
        if word in agreed.split():
            digest = hashlib.blake2b(agreed.encode(), digest_size=8).hexdigest()
            return f"natgrad/start/{digest}"
        time.sleep(POLL_SECONDS)
    answer = _text(store, "answer")
    missing = [r for r in range(size) if _text(store, f"confirmed/{r}") != answer]
    raise TimeoutError(f"Ranks {missing} have not come within {timeout:g} s.")


def _answer(store: Any, size: int) -> None:
    """Rank 0: everybody's words, and whether everybody has confirmed them."""
    words = [_text(store, f"word/{rank}") for rank in range(size)]
    if not all(words):
        return
    answer = " ".join(words)
    store.set(f"{PREFIX}/answer", answer)
    confirmed = [_text(store, f"confirmed/{rank}") for rank in range(1, size)]
    if all(text == answer for text in confirmed):
        store.set(f"{PREFIX}/agreed", answer)


def _text(store: Any, name: str) -> str:
    key = f"{PREFIX}/{name}"
    return store.get(key).decode() if store.check([key]) else ""
