"""Which texts an evaluation scores, which of their documents, and whether the bundle or the model has seen them.

Documents of a source that is split into sets for training are taken from one of the held-out sets. Any other source is
scored whole.
"""

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dejavu_train.bundle.artifact import Bundle
from dejavu_train.data.paragraphs import hash_paragraphs, read_paragraph_hashes
from dejavu_train.data.text import (
    INSTALLED,
    INSTALLED_DOCS,
    Document,
    TextSource,
    drop_pretrained,
    load_documents,
    split_documents,
)
from dejavu_train.data.tokens import require_one_sequence, start_token
from dejavu_train.evaluation.perplexity import DOCUMENTS, EvalCorpus, hold_out
from dejavu_train.ground.files import read_json, sha256_text

logger = logging.getLogger(__name__)

IN_DOMAIN, UNSEEN = "in domain", "unseen"
ONE_WINDOW_EACH = 1 << 40  # over how many documents tokens are spread: over all
_TOLD_FROM = 0.01  # share of paragraphs that the model was pretrained on from which a file is worth a warning


@dataclasses.dataclass(frozen=True)
class EvalText:
    """A text cut into windows, and what the results say of it.

    ``sha256`` is that of the whole source (as in the manifest of activations), ``set_name`` the set that was taken of
    it, None for all documents. ``whole`` says that all documents were scored to their end. ``domain`` is ``in domain``
    when the bundle's predictors were trained on the same source, else ``unseen``. ``pretrained_paragraphs`` of an
    installed source were left out, because the model was pretrained on them.
    """

    name: str
    source: str
    sha256: str
    set_name: str | None
    whole: bool
    domain: str
    pretrained_paragraphs: int
    window: int
    held: EvalCorpus


def trained_text(bundle: Bundle, folder: str) -> dict[str, Any]:
    """Text that the predictors in ``folder`` were trained on, as the bundle says. Empty if nothing is known."""
    text = bundle.metadata.get("text")
    beside = Path(folder).parent / "activations" / "manifest.json"
    if not isinstance(text, dict) and beside.is_file():
        text = read_json(beside, "the manifest of the activation shards").get("text")
    return text if isinstance(text, dict) else {}


def load_text(
    name: str,
    source: TextSource,
    set_name: str,
    model: str,
    trained: dict[str, Any],
    tokenizer: Any,
    window: int,
    tokens: int | None,
    seed: int = 0,
    spread: int = DOCUMENTS,
) -> EvalText:
    """Read a source, choose its documents, warn of what was trained on, and cut windows.

    Args:
        name: of the text in results and messages.
        set_name: the set that is scored of a source that is split. These are the source of the predictors, hub
            datasets, classes, and ``installed-docs``, on whose ``train`` documents opt-mini was pretrained.
        model: folder or hub id. The folder may carry hashes of the paragraphs it was pretrained on.
        trained: of :func:`trained_text`.
        window: ``</s>`` and ``window`` - 1 new tokens.
        tokens: how many to score, about. None for all.
        seed: of the order in which documents are drawn where ``tokens`` limits them.
        spread: over how many documents ``tokens`` are spread, at least, if there are so many.

    Raises:
        UserError: what :func:`load_documents` raises, an empty set, or less text than one window.
    """
    documents, _ = load_documents(source)
    digest = sha256_text("".join(sha256_text(document.text) for document in documents))
    is_file = isinstance(source.source, str) and Path(source.source).is_file()
    # Two files may have one name; an installed source of other versions stays the same domain and keeps its split.
    same = trained.get("source") == source.key and (not is_file or trained.get("sha256") == digest)
    seen_by_predictors = 0
    pretrained = read_paragraph_hashes(model)
    skipped = 0
    split = source.source == INSTALLED_DOCS or not (is_file or source.source in INSTALLED)
    chosen = set_name if same or split else None
    if chosen is not None:
        sets, skipped = split_documents(documents, source.key, pretrained)
        documents = sets[chosen]
    else:
        seen_by_predictors = _trained_on(name, documents, trained)
        if source.source in INSTALLED and pretrained is not None:
            documents, skipped = drop_pretrained(documents, pretrained)
        elif pretrained is not None:
            _warn_of_pretraining(name, documents, pretrained)
    if skipped:
        logger.info("%s: %d paragraphs left out, the model was pretrained on them", name, skipped)
    held = hold_out(documents, tokenizer, window, tokens, seed, spread)
    require_one_sequence(held.tokens, window, name)
    domain = IN_DOMAIN if same or seen_by_predictors else UNSEEN
    whole = chosen is None and not held.truncated
    shown = source.source if isinstance(source.source, str) else source.key
    return EvalText(name, shown, digest, chosen, whole, domain, skipped, window, held)


def load_spread(
    config: Any, bundle: Bundle | None, tokenizer: Any, set_name: str, window: int, tokens: int | None
) -> EvalText:
    """The text that a config names, about ``tokens`` of it, a window of each document before any gives a second one.

    Args:
        config: a TextConfig with one ``text``.
        bundle: of ``config.bundle``, or None.
    Raises:
        UserError: what :func:`load_text` raises.
    """
    trained = trained_text(bundle, config.bundle) if bundle else {}
    options = (config.model, trained, tokenizer, window, tokens, config.seed, ONE_WINDOW_EACH)
    return load_text(config.text, config.source(config.text), set_name, *options)


def behind_start(tokenizer: Any, text: str, flag: str) -> list[int]:
    """Token ids of a text behind one start token, which is added where the text does not begin with it. Says so.

    Args:
        flag: that gave the text.
    """
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    start = start_token(tokenizer)
    if ids[:1] != [start]:
        return [start, *ids]
    logger.info("%s begins with %s: no other is put before it", flag, tokenizer.convert_ids_to_tokens(start))
    return ids


def _trained_on(name: str, documents: Sequence[Document], trained: dict[str, Any]) -> int:
    """How many of the documents trained the predictors, by the hashes in the bundle. Warns if there are any."""
    known = set(trained.get("train_sha256", ()))
    seen = sum(sha256_text(document.text)[:16] in known for document in documents)
    if seen:
        logger.warning(
            "warning: %d of %d documents of %s trained the predictors: its figures are not held-out; give another text",
            seen,
            len(documents),
            name,
        )
    return seen


def _warn_of_pretraining(name: str, documents: Sequence[Document], pretrained: np.ndarray) -> None:
    hashes = hash_paragraphs(document.text for document in documents)
    share = float(np.isin(hashes, pretrained).mean()) if len(hashes) else 0.0
    if share > _TOLD_FROM:
        logger.warning("warning: the model was pretrained on %.0f%% of the paragraphs of %s", 100 * share, name)
