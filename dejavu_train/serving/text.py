"""Text of tokens that come one after another, up to the first stop string."""

from collections.abc import Sequence
from typing import Any

UNFINISHED = "\ufffd"  # what a tokenizer writes for a part of a character


class Text:
    """The text of one row.

    Args:
        stops: strings before which the text ends. What may be the beginning of one is held back.
    Attributes:
        tokens: read so far. ended: whether a stop string was found.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._ids: list[int] = []
        self._start = self._shown = 0
        self._held = ""
        self.tokens, self.ended = 0, False

    def add(self, ids: Sequence[int], last: bool = False) -> str:
        """What these tokens add. last: nothing follows, so nothing is held back."""
        parts = [[token] for token in ids] if self._stops else [list(ids)]
        found = "".join(self._add(part) for part in parts if not self.ended)
        if last and not self.ended:
            found += self._find(self._decode(True)) + self._held
            self._held = ""
        return found

    def _add(self, ids: list[int]) -> str:
        self._ids += ids
        self.tokens += len(ids)
        return self._find(self._decode(False))

    def _decode(self, last: bool) -> str:
        """Text behind what was shown. The tokens before it come along, since some tokenizers look back."""
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        before = self._tokenizer.decode(self._ids[self._start : self._shown], **options)
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
