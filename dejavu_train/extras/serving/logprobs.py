"""Log-probabilities in OpenAI's two forms."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from dejavu_train.engine.scores import Score
from dejavu_train.extras.serving.text import UNFINISHED, Decoder, Vocabulary

BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _letters_of_bytes() -> dict[str, int]:
    """The letters in which tokenizers over bytes spell them: printable ones stand for themselves."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


LETTERS = _letters_of_bytes()


class TokenTexts:
    """Texts that single tokens write behind others. Each is looked up once.

    Args:
        vocabulary: of the tokenizer.
    """

    def __init__(self, tokenizer: Any, vocabulary: Vocabulary) -> None:
        self._tokenizer, self._hidden = tokenizer, vocabulary.hidden
        self._before = tokenizer("a", add_special_tokens=False).input_ids
        self._known: dict[int, tuple[str, bytes]] = {}

    def text(self, token: int) -> str:
        """Its text, or ``bytes:`` and the bytes of a part of a character."""
        return self._look(token)[0]

    def codes(self, token: int) -> list[int]:
        """Its text in UTF-8."""
        return list(self._look(token)[1])

    def _look(self, token: int) -> tuple[str, bytes]:
        if token not in self._known:
            self._known[token] = self._read(token)
        return self._known[token]

    def _read(self, token: int) -> tuple[str, bytes]:
        if token in self._hidden:
            return self._hidden[token], self._hidden[token].encode()
        text = Decoder(self._tokenizer, self._before).add([token], last=True)
        if UNFINISHED in text:
            spelled = self._tokenizer.convert_ids_to_tokens(token) or ""
            if byte := BYTE.fullmatch(spelled):
                raw = bytes([int(byte[1], 16)])
            elif all(letter in LETTERS for letter in spelled):
                raw = bytes(LETTERS[letter] for letter in spelled)
            else:
                return text, text.encode()
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw
        return text, text.encode("utf-8", "replace")


class ChoiceScores:
    """The log-probabilities of one choice, a part at a time.

    Args:
        chat: the form. behind: ids before the first token that is scored, which the text of the answer does not have.
    """

    def __init__(self, texts: TokenTexts, decoder: Decoder, chat: bool) -> None:
        self._texts, self._decoder, self._chat = texts, decoder, chat
        self._offset = 0

    def part(self, scores: Sequence[Score], first: int | None = None) -> dict[str, Any]:
        """Part of OpenAI's answers on some tokens.

        Args:
            first: a token in front of them that nothing is known of, the first of a prompt.
        """
        if self._chat:
            return {"content": [self._entry(each.token, each.logprob, each.top) for each in scores], "refusal": None}
        found: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        if first is not None:
            self._append(found, first, None, None)
        for each in scores:
            top: dict[str, float] = {}
            for token, nats in (*each.top, (each.token, each.logprob)):
                top.setdefault(self._texts.text(token), nats)  # two tokens may write the same: the likelier counts
            self._append(found, each.token, each.logprob, top)
        return found

    def _append(self, found: dict[str, Any], token: int, nats: float | None, top: Any) -> None:
        entry = (self._texts.text(token), nats, top, self._offset)
        for name, value in zip(found, entry, strict=True):
            found[name].append(value)
        self._offset += len(self._decoder.add([token]))

    def _entry(self, token: int, nats: float, top: Iterable[tuple[int, float]] | None = None) -> dict[str, Any]:
        entry = {"token": self._texts.text(token), "logprob": nats, "bytes": self._texts.codes(token)}
        return entry if top is None else entry | {"top_logprobs": [self._entry(*each) for each in top]}
