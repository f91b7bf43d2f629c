"""A name for what decides the token ids of a text: the tokenizer's vocabulary, its merges, and what comes before them.

The files are not hashed: two versions of transformers write the same tokenizer differently, and ``tokenizer.json`` says
in another way what ``vocab.json`` and ``merges.txt`` say. Vocabulary and merges are read from the loaded tokenizer.
Whatever else decides ids (normaliser, pre-tokeniser, flags of added tokens, the token put first) shows in the ids of a
fixed probe.
"""

import json
from pathlib import Path
from typing import Any

from dejavu_train.ground.files import json_digest
from dejavu_train.models.load import load_tokenizer

TOKENIZER_FILES = ("tokenizer.json", "vocab.json")
PROBE = (
    "",
    "".join(map(chr, range(32, 127))),
    "The CAT's they're we've I'd it'll don't; naïve Café cafe\u0301 Straße \u0130stanbul",
    "  two  spaces,   three\tand a tab \n\nlines\r\n \f\u00a0\u2009\u200b\u2028\x00\x7f end  ",
    "3.14 1,000,000 0x1F 2026-11-22 \u0663\u0664 \uff11\uff12 \u00b2 \u2163 \ufb01 \u2126 x1y22z333",
    "\u6f22\u5b57\u3068\u304b\u306a \ud55c\uae00 \u0440\u0443\u0441\u0441\u043a\u0438\u0439 \u0639\u0631\u0628\u064a"
    " \u0e44\u0e17\u0e22 \U0001f600\U0001f469\u200d\U0001f52c \u2014\u201c\u201d\u2026",
    "def f(x_1, *args): return {'a': [x_1 ** 2], \"b\": <s> and </s>}  # snake_case camelCase",
)


def tokenizer_hash(name: str, revision: str | None = None) -> str | None:
    """The hash of the tokenizer beside a model. None for a folder without one.

    Args:
        name: folder or hub id of the model.
        revision: commit or tag of a hub model.
    Raises:
        UserError: as :func:`load_tokenizer`.
    """
    folder = Path(name)
    if folder.is_dir() and not any((folder / file).is_file() for file in TOKENIZER_FILES):
        return None
    return hash_of(load_tokenizer(name, revision))


def hash_of(tokenizer: Any) -> str:
    """SHA-256 over vocabulary, merges (of a Unigram: pieces and scores) and the ids of ``PROBE``, in hexadecimal."""
    vocabulary = tokenizer.get_vocab()
    backend = getattr(tokenizer, "backend_tokenizer", None)  # a tokenizer written in Python has none to show
    model = {} if backend is None else json.loads(backend.to_str())["model"]
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model.get("merges", ())]
    scores = model["vocab"] if isinstance(model.get("vocab"), list) else []
    probes = [*PROBE, *(f"a {token}  b{token}c" for token in sorted(tokenizer.get_added_vocab()))]
    ids = [tokenizer(probe)["input_ids"] for probe in probes]
    return json_digest([sorted((place, token) for token, place in vocabulary.items()), merges, scores, ids])
