"""The text that a model is pretrained on: its tokenizer, one row of token ids, the rows of a step."""

import json
import logging
import lzma
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast

from dejavu_train.data.text import TextSource, load_documents, require_file, split_of
from dejavu_train.data.tokens import START_TOKEN
from dejavu_train.ground.errors import UserError
from dejavu_train.ground.files import replacing
from dejavu_train.ground.progress import progress
from dejavu_train.models.tokenizer_hash import hash_of

logger = logging.getLogger(__name__)

SPECIAL_TOKENS = ["<s>", "<pad>", "</s>", "<unk>"]  # ids 0 to 3, as in OPT
STREAM = ".tokens.xz"  # how the name of a file of packed ids ends
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9, "lc": 2, "lp": 1, "pb": 1}]  # of numbers of two bytes


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE with OPT's special ids (``<s>`` 0, ``<pad>`` 1, ``</s>`` 2, ``<unk>`` 3).

    As OPT's own, it puts ``</s>`` before a text when special tokens are asked for.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="</s> $A", pair="</s> $A $B", special_tokens=[("</s>", START_TOKEN)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="</s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )


def read_text(names: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs (source, text) of all documents that may be trained on.

    Each name is a file, a hub dataset or ``installed-docs``. A JSONL file whose name starts with installed-docs and
    ``installed-docs`` itself give their ``train`` documents only. The other sets stay unseen.
    """
    texts = []
    for name in names:
        source = TextSource(source=name)
        documents, _ = load_documents(source)
        is_docs = Path(name).name.startswith("installed-docs")
        key = "installed-docs" if is_docs else source.key
        kept = [document for document in documents if not is_docs or split_of(key, document.name) == "train"]
        logger.info("%s: %d of %d documents", name, len(kept), len(documents))
        texts += [(key, document.text) for document in kept]
    return texts


def token_stream(tokenizer: Any, texts: Sequence[str]) -> np.ndarray:
    """All texts as one row of token ids (uint16 where they fit), each started by ``</s>``."""
    pieces = []
    dtype = np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32
    starts = range(0, len(texts), 64)
    for start in progress(starts, "tokenising", len(starts), "batch"):
        batch = tokenizer(list(texts[start : start + 64]), add_special_tokens=True, verbose=False)["input_ids"]
        pieces += [np.asarray(ids, dtype=dtype) for ids in batch]
    return np.concatenate(pieces)


def write_stream(path: str | Path, stream: np.ndarray, tokenizer: Any) -> None:
    """Token ids (N,) below 2^16 as a file that pretraining reads in the place of text.

    A line of JSON names the tokenizer, ids of two bytes follow, all of it compressed by LZMA.
    """
    line = json.dumps({"tokenizer": hash_of(tokenizer), "tokens": len(stream)}).encode() + b"\n"
    line = line.rjust(len(line) + len(line) % 2)  # ids begin at an even place, which compresses better
    with replacing(path) as temporary:
        temporary.write_bytes(lzma.compress(line + stream.astype("<u2").tobytes(), filters=_FILTERS))


def read_stream(path: str | Path, tokenizer: Any) -> np.ndarray:
    """(N,) uint16, what :func:`write_stream` wrote.

    Raises:
        UserError: there is no such file, it is damaged, or it was written with another tokenizer.
    """
    require_file(str(path))
    try:
        line, _, ids = lzma.decompress(Path(path).read_bytes()).partition(b"\n")
        about, stream = json.loads(line), np.frombuffer(ids, "<u2")
        whole = len(stream) == about["tokens"]
    except (lzma.LZMAError, ValueError, KeyError, TypeError):
        whole, about = False, {}
    if not whole:
        raise UserError(f"{path} is no file of token ids, or is damaged; write it anew")
    if about.get("tokenizer") != hash_of(tokenizer):
        raise UserError(f"{path} holds ids of another tokenizer; put its tokenizer.json into the output folder")
    return stream


def load_stream(names: Sequence[str], tokenizer: Any, texts: Sequence[str]) -> np.ndarray:
    """Ids of those ``names`` that are files of ids, then of ``texts``, in one row."""
    parts = [read_stream(name, tokenizer) for name in names if is_stream(name)]
    return np.concatenate([*parts, *([token_stream(tokenizer, texts)] if texts else [])])


def is_stream(name: str) -> bool:
    """Whether a name is that of a file of token ids."""
    return name.endswith(STREAM)


class RowSampler:
    """Rows of ``</s>`` and ``context`` tokens from random places: the same rows for the same step, also after a resume.

    Every epoch cuts the stream at another phase and shuffles the pieces.
    """

    def __init__(self, stream: Tensor, context: int, rows: int, seed: int) -> None:
        self.stream, self.context, self.rows, self.seed = stream, context, rows, seed
        self.pieces = (len(stream) - context) // context
        if self.pieces < 1:
            raise UserError(f"the text has {len(stream)} tokens, fewer than one sequence of {context}; give more text")
        self._epoch, self._starts = -1, torch.empty(0)

    def __call__(self, step: int) -> Tensor:
        """The (rows, context + 1) int64 batch of a step."""
        indices = range(step * self.rows, (step + 1) * self.rows)
        starts = torch.stack([self._start(index) for index in indices])
        offsets = torch.arange(self.context, device=self.stream.device)
        rows = self.stream[starts.to(self.stream.device)[:, None] + offsets].long()
        return F.pad(rows, (1, 0), value=START_TOKEN)

    def _start(self, index: int) -> Tensor:
        epoch, place = divmod(index, self.pieces)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            phase = torch.randint(self.context, (1,), generator=generator)
            self._starts = torch.randperm(self.pieces, generator=generator) * self.context + phase
            self._epoch = epoch
        return self._starts[place]
