"""Text of tokens that come one after another, up to the first stop string."""

from collections.abc import Sequence
from typing import Any

UNFINISHED = "\ufffd"  # what a tokenizer writes for a part of a character


class Text:
    """The text of one row.

    Args:
        stops: strings before which the text ends. What may be the beginning of one is held back.
        whole: nobody reads it before its end. Without stops its tokens become text at once then.
    Attributes:
        ended: whether a stop string was found.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = (), whole: bool = False) -> None:
        self._tokenizer, self._stops, self._late = tokenizer, tuple(stops), whole and not stops
        self._ids: list[int] = []
        self._start = self._shown = 0
        self._held = ""
        self.ended = False

    @property
    def tokens(self) -> int:
        """Read so far. Those behind the one that completes a stop string are not counted."""
        return len(self._ids)

    def add(self, ids: Sequence[int], last: bool = False) -> str:
        """What these tokens add. last: nothing follows, so nothing is held back."""
        if self.ended:
            return ""
        before = self._start, self._shown, self._held
        found = self._read(ids, last)
        if self.ended:  # which of the tokens has completed the stop?
            (self._start, self._shown, self._held), self.ended = before, False
            again = self._ids[self._shown :]
            del self._ids[self._shown :]
            found = ""
            for i, token in enumerate(again):
                if not self.ended:
                    found += self._read([token], last and i == len(again) - 1)
        return found

    def _read(self, ids: Sequence[int], last: bool) -> str:
        self._ids += ids
        if not last and (self._late or not ids):
            return ""
        found = self._find(self._decode(last))
        if last and not self.ended:
            found, self._held = found + self._held, ""
        return found

    def _decode(self, last: bool) -> str:
        """Text behind what was shown. The tokens before it come along, since some tokenizers look back."""
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        if self._shown == len(self._ids):
            return ""
        before = self._tokenizer.decode(self._ids[self._start : self._shown], **options) if self._shown else ""
        whole = self._tokenizer.decode(self._ids[self._start :], **options)
        if whole.endswith(UNFINISHED) and not last:
            return ""
        self._start, self._shown = self._shown, len(self._ids)
        return whole[len(before) :]

    def _find(self, new: str) -> str:
        text = self._held + new
        places = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if places and not self.ended:
            self.ended, self._held = True, ""
            return text[: min(places)]
        keep = max((n for stop in self._stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]
