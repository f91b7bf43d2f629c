"""Tokenizers of the usual kinds, trained on a few words, and random ids of them."""

import random

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

WORDS = "the model reads a token and the layer keeps those rows that matter, naïve 🙂 日本語 — so it is".split()
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_end|>"]


def texts():
    rng = random.Random(0)
    return [" ".join(rng.choices(WORDS, k=9)) + ".\n" for _ in range(200)]


def _wrapped(made, **options):
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<unk>"}
    extra = {"additional_special_tokens": ["<|im_end|>"]}
    return PreTrainedTokenizerFast(tokenizer_object=made, **names, **extra, **options)


def over_bytes():
    """As GPT-2 and OPT have it."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        texts(), trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet)
    )
    return _wrapped(made)


def pieces(unigram=False):
    """In the manner of SentencePiece: words begin with a mark for their space, and the first loses it."""
    made = Tokenizer(models.Unigram() if unigram else models.BPE(unk_token="<unk>", fuse_unk=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    kind = {"unk_token": "<unk>"} if unigram else {}
    trainer = trainers.UnigramTrainer if unigram else trainers.BpeTrainer
    made.train_from_iterator(texts(), trainer(vocab_size=200, special_tokens=SPECIAL, **kind))
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return _wrapped(made)


def pieces_and_bytes():
    """As Llama has it: what has no piece is spelled in bytes."""
    whole = pieces().backend_tokenizer
    state = whole.get_vocab()
    names = SPECIAL + [f"<0x{byte:02X}>" for byte in range(256)]
    letters = [name for name in sorted(state) if name not in SPECIAL and len(name) == 1 and name.isascii()]
    vocab = {name: i for i, name in enumerate([*names, "▁", *letters, "▁t", "▁th", "th"])}
    made = Tokenizer(models.BPE(vocab, [("▁", "t"), ("t", "h"), ("▁t", "h")], unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return _wrapped(made)


def metaspace():
    """Words begin with a mark, and the decoder drops that of the first."""
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    made.train_from_iterator(
        texts(), trainers.UnigramTrainer(vocab_size=200, special_tokens=SPECIAL, unk_token="<unk>")
    )
    return _wrapped(made)


KINDS = {
    "over bytes": over_bytes,
    "pieces": pieces,
    "unigram": lambda: pieces(unigram=True),
    "pieces and bytes": pieces_and_bytes,
    "metaspace": metaspace,
}
