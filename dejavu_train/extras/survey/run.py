"""Walks from a model's name to its survey."""

import dataclasses
import hashlib
import json
import logging
import time
from pathlib import Path
from typing import Any

import transformers

from dejavu_train.data.text import TextSource
from dejavu_train.evaluation.config import name_texts
from dejavu_train.evaluation.perplexity import EvalCorpus
from dejavu_train.evaluation.shared_config import TEXT_SET
from dejavu_train.evaluation.texts import load_text
from dejavu_train.extras.survey.config import SurveyConfig
from dejavu_train.extras.survey.decoder import GGUF, check_window, find_parts, load_decoder, located, read_config
from dejavu_train.extras.survey.layerwise import LayerRunner
from dejavu_train.extras.survey.measure import Selection, Survey
from dejavu_train.extras.survey.page import Found, page, rows_of, untrained, verdict, write
from dejavu_train.extras.survey.speed import this_machine
from dejavu_train.families import Target
from dejavu_train.ground.errors import UserError, first_line
from dejavu_train.models.load import resolve_device

logger = logging.getLogger(__name__)
STATE = "survey.safetensors"


def run(config: SurveyConfig) -> Found:
    """Everything that the command does. Raises :class:`UserError` for what the user can mend."""
    transformers.utils.logging.disable_progress_bar()
    device = resolve_device(config.device)
    values = read_config(config.model, config.revision)
    parts = find_parts(config.model, values)
    check_window(config.model, values, config.window)
    held = _texts(config, _tokenizer(config))
    vocabulary, largest = values.get_text_config().vocab_size, max(map(max, held.windows))
    if largest >= vocabulary:
        raise UserError(
            f"the tokenizer of {config.model} gives the token {largest}, the model has {vocabulary} embeddings; give"
            " the tokenizer that belongs to the model"
        )
    selections = [
        Selection(),
        *(Selection(Target.MLP, share) for share in sorted(config.neuron_shares, reverse=True)),
        *(Selection(Target.HEADS, share) for share in sorted(config.head_shares, reverse=True)),
    ]
    selections = [each for each in selections if each.target is None or each.kept(parts) < 1]
    model = load_decoder(config.model, config.revision, values, parts.layers)
    runner, state = LayerRunner(model, parts.layers, device), Path(config.output) / STATE
    survey = Survey(runner, parts, held, selections, state, _identity(config, held), time.monotonic)
    found = Found(
        name=Path(config.model).stem if config.model.endswith(GGUF) else Path(config.model).name,
        parts=parts,
        surveyed=survey.run(),
        document_tokens=held.document_tokens,
        texts=tuple(name_texts(config.text)),
        vocabulary=vocabulary,
        here=this_machine(device),
    )
    files = write(found, Path(config.output))
    rows = rows_of(found)
    said = [page(found, rows, drawn=False), verdict(found, rows)]
    print("\n".join(reversed(said) if untrained(found) else said))  # before all numbers that mean nothing
    logger.info("wrote %s", ", ".join(map(str, files)))
    return found


def check(config: SurveyConfig) -> str:
    """Words for what would be surveyed. Raises :class:`UserError` as :func:`run` does before the model is loaded."""
    resolve_device(config.device)
    values = read_config(config.model, config.revision)
    parts = find_parts(config.model, values)
    check_window(config.model, values, config.window)
    _tokenizer(config)
    return (
        f"survey {config.model}: {parts.n_layers} layers, {parts.d_ffn} neurons, {parts.groups} head groups, about"
        f" {config.tokens:,} tokens of {', '.join(name_texts(config.text))}, results in {config.output}; no mistake was"
        " found"
    )


def _tokenizer(config: SurveyConfig) -> Any:
    where, options = located(config.model, config.revision)
    try:
        return transformers.AutoTokenizer.from_pretrained(where, trust_remote_code=False, **options)
    except (OSError, ValueError, TypeError, KeyError, ImportError) as error:
        raise UserError(f"cannot load a tokenizer from {config.model}: {first_line(error)}") from None


def _texts(config: SurveyConfig, tokenizer: Any) -> EvalCorpus:
    """All texts as one, with an even share of the tokens each."""
    named = name_texts(config.text)
    share = max(config.window - 1, config.tokens // len(named))
    held = EvalCorpus([], [], [], 0)
    for name, source in named.items():
        text = TextSource(
            source=source, config=config.text_config, revision=config.text_revision, field=config.text_field,
            cache=config.text_cache,
        )  # fmt: skip
        trained: dict[str, Any] = {}
        own = load_text(name, text, TEXT_SET, config.model, trained, tokenizer, config.window, share, config.seed).held
        held.document += [len(held.document_tokens) + each for each in own.document]
        held.windows += own.windows
        held.document_tokens += own.document_tokens
        held.bytes += own.bytes
    return held


def _identity(config: SurveyConfig, held: EvalCorpus) -> str:
    """Hash of what an interrupted survey goes on with: the settings, the tokens, the weights' files."""
    folder = Path(config.model)
    files = [folder] if folder.is_file() else sorted(folder.glob("*.safetensors"))
    stamped = [(each.name, each.stat().st_size, each.stat().st_mtime_ns) for each in files]
    values = {**dataclasses.asdict(config), "output": "", "windows": held.windows, "files": stamped}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
