"""Text of tokens that come one after another behind a prompt, up to where it ends.

Streams and whole answers are read by the same decoder. It begins behind the prompt's last tokens. What a token writes
depends on those before it: in the manner of SentencePiece a first word has no space.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
UNFINISHED = "\ufffd"  # what a tokenizer writes for a part of a character
TAIL = 8  # last tokens of a prompt that are looked at, or more where these write nothing


@dataclass(frozen=True)
class Vocabulary:
    """Facts that a decoder needs of a tokenizer.

    Attributes:
        hidden: tokens that a text does not show, with their names: special ones, such as ``</s>``.
        bytes: tokens that spell a byte each. What such a token writes depends on all of those beside it.
    """

    hidden: Mapping[int, str] = field(default_factory=dict)
    bytes: frozenset[int] = frozenset()

    @classmethod
    def of(cls, tokenizer: Any) -> "Vocabulary":
        """Read a tokenizer of transformers."""
        known = {token: str(added) for token, added in tokenizer.added_tokens_decoder.items() if added.special}
        known |= {token: tokenizer.convert_ids_to_tokens(token) for token in tokenizer.all_special_ids}
        hidden = {
            token: name for token, name in known.items() if not tokenizer.decode([token], skip_special_tokens=True)
        }
        ids = tokenizer.get_vocab()
        return cls(hidden, frozenset(ids[name] for name in BYTES if name in ids))


PLAIN = Vocabulary()


class Decoder:
    """Tokens to text, a part at a time.

    Args:
        prompt: ids before the first. unseen: ids that write nothing, beside hidden ones.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt: Sequence[int] = (),
        vocabulary: Vocabulary = PLAIN,
        unseen: Collection[int] = (),
    ) -> None:
        self._tokenizer, self._vocabulary, self._unseen = tokenizer, vocabulary, unseen
        n = TAIL
        self._ids = self._visible(prompt[-n:])
        while n < len(prompt) and not self._text(0, len(self._ids)):
            n *= 4
            self._ids = self._visible(prompt[-n:])
        # Text before `shown` was given. It and what follows are decoded from `start` on, from `next` where that shows.
        self._start, self._next, self._shown = 0, 0, len(self._ids)

    def add(self, ids: Sequence[int], last: bool = False) -> str:
        """Text that these tokens add. A part of a character is held back. last: nothing follows, so nothing is."""
        self._ids += self._visible(ids)
        if self._shown == len(self._ids) or (self._ids[-1] in self._vocabulary.bytes and not last):
            return ""
        before = self._text(self._next, self._shown)
        if before:
            self._start = self._next
        else:  # in front of it anything would be a first token
            before = self._text(self._start, self._shown)
        whole = self._text(self._start, len(self._ids))
        if whole.endswith(UNFINISHED) and not last:
            return ""
        self._next, self._shown = self._shown, len(self._ids)
        return whole[len(os.path.commonprefix((before, whole))) :]

    def mark(self) -> tuple[int, ...]:
        """Where it stands, for `go_back`."""
        return len(self._ids), self._start, self._next, self._shown

    def go_back(self, mark: tuple[int, ...]) -> None:
        """Forget what was added behind a mark."""
        length, self._start, self._next, self._shown = mark
        del self._ids[length:]

    def _visible(self, ids: Sequence[int]) -> list[int]:
        hidden = self._vocabulary.hidden
        return [token for token in ids if token not in hidden and token not in self._unseen]

    def _text(self, start: int, stop: int) -> str:
        if start == stop:
            return ""
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return self._tokenizer.decode(self._ids[start:stop], **options)


class Text:
    """The text of one row, behind its prompt.

    Args:
        prompt: ids before the text.
        stops: strings before which the text ends. What may be the beginning of one is held back. A stop may name tokens
            that the text does not show.
        ends: ids at which the text ends. It does not show them.
        whole: nobody reads it before its end. Without stops its tokens become text at once then.
        least: tokens before which no id of ``ends`` counts.
    Attributes:
        ended: whether a stop string or an id of ``ends`` was found.
        tokens: read so far. Those behind the one at which the text ends are not counted.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt: Sequence[int] = (),
        stops: Sequence[str] = (),
        ends: Collection[int] = (),
        vocabulary: Vocabulary = PLAIN,
        whole: bool = False,
        least: int = 0,
    ) -> None:
        names = vocabulary.hidden
        self._stops, self._ends, self._late = tuple(stops), ends, whole and not stops
        self._named = {token: name for token, name in names.items() if any(name in stop for stop in stops)}
        self._decoder = Decoder(tokenizer, prompt, vocabulary, ends)
        self._waiting: list[int] = []
        self._least = least
        self._held, self._unseen = "", ""  # text that may begin a stop, and a mark below each character: is it shown?
        self.ended, self.tokens = False, 0

    def add(self, ids: Sequence[int], last: bool = False) -> str:
        """Text that these tokens add. last: nothing follows, so nothing is held back."""
        if self.ended:
            return ""
        first = max(0, self._least - self.tokens)
        end = next((i for i, token in enumerate(ids) if i >= first and token in self._ends), None)
        if end is not None:
            ids, last = ids[: end + 1], True
        before = self._decoder.mark(), self._held, self._unseen, self.tokens
        found = self._read(ids, last)
        if self.ended and len(ids) > 1:  # which of the tokens has completed the stop?
            mark, self._held, self._unseen, self.tokens = before
            self._decoder.go_back(mark)
            self.ended, found = False, ""
            for i, token in enumerate(ids):
                if not self.ended:
                    found += self._read([token], last and i == len(ids) - 1)
        self.ended = self.ended or end is not None
        return found

    def _read(self, ids: Sequence[int], last: bool) -> str:
        self.tokens += len(ids)
        if self._late:
            self._waiting += ids
            return self._decoder.add(self._waiting, last) if last else ""
        found, start = "", 0
        for i, token in enumerate(ids):
            if token in self._named:
                found += self._find(self._decoder.add(ids[start:i]))
                found += self._find(self._named[token], "1")
                start = i + 1
        found += self._find(self._decoder.add(ids[start:], last))
        if last and not self.ended:
            found += _shown(self._held, self._unseen)
            self._held = self._unseen = ""
        return found

    def _find(self, new: str, unseen: str = "0") -> str:
        """The text that is sure once ``new`` has come. unseen: 1 for the name of a token that is not shown."""
        if self.ended:
            return ""
        text, marks = self._held + new, self._unseen + unseen * len(new)
        places = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if places:
            self.ended, self._held, self._unseen = True, "", ""
            return _shown(text[: min(places)], marks)
        keep = max((n for stop in self._stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
        sure = len(text) - keep
        self._held, self._unseen = text[sure:], marks[sure:]
        return _shown(text[:sure], marks)


def _shown(text: str, marks: str) -> str:
    """Characters of a text above a 0."""
    if "1" not in marks:
        return text
    return "".join(letter for letter, mark in zip(text, marks, strict=False) if mark == "0")
