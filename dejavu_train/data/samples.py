"""Reads a dense model, writes text that it wrote itself, as token ids: the default text of predictors.

Text sampled from the model covers what the model knows: temperature 1, nothing cut off, from ``</s>`` on. So predictors
trained on it hold on texts of every kind, and no data set is needed. Quantisation-aware training knows the idea
(LLM-QAT, arXiv 2305.17888, section 3.1).

    samples.xz     token ids as 32-bit words, byte planes side by side, LZMA: rows one after the other
    samples.json   which model wrote them, how, how many, and the digest of samples.xz
    part_0007.xz   while sampling: one batch of rows; sampling that was stopped goes on after the last part

A model's folder may carry the first two (opt-mini does). Otherwise they are cached in a folder named by a hash of the
weights and the settings.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import lzma
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dejavu_train.data.packed import pack, unpack
from dejavu_train.data.text import SELF, Document, SampleConfig, TextManifest, TextSource, load_documents
from dejavu_train.data.tokens import START_TOKEN, end_tokens, start_token
from dejavu_train.ground.errors import UserError
from dejavu_train.ground.files import read_sealed, replacing, sha256_file, write_sealed
from dejavu_train.ground.locks import locked
from dejavu_train.ground.progress import Progress
from dejavu_train.models.load import drop_generation_defaults

logger = logging.getLogger(__name__)

SCHEMA = 1
TOKENS_ON_GPU = 1_000_000
TOKENS_ON_CPU = 200_000
CYCLE = ("val", "calibration", "calibration", *("train",) * 22)  # the sets of each 25 rows in turn
MAX_SEED = 1 << 26  # what the engine takes
NOT_BY_LAYERS = (
    "collect.by_layers has one layer at a time, and text.source self needs all layers for every token that the model"
    " writes; give --text FILE or a data set, or --collect.by_layers false and --collect.device_map auto: what"
    " the model writes so is found by later runs"
)

Rows = list[list[int]]
Write = Callable[[Rows, int, int], Rows]
"""``write(prompts, length, seed)``: every prompt continued to ``length`` tokens, the prompt included."""


@dataclasses.dataclass(frozen=True)
class SampleManifest:
    """Contents of ``samples.json``."""

    model: str
    weight_hash: str
    settings: dict[str, Any]
    rows: int
    tokens: int
    sha256: str
    writer: str
    versions: dict[str, str]

    def save(self, folder: Path) -> None:
        write_sealed(folder / "samples.json", {"schema": SCHEMA, **dataclasses.asdict(self)})

    @classmethod
    def load(cls, folder: Path) -> "SampleManifest":
        """Read ``samples.json``.

        Raises:
            UserError: missing, damaged or of another schema.
        """
        values = read_sealed(folder / "samples.json", "the manifest of the model's samples")
        try:
            if values.pop("schema") != SCHEMA:
                raise UserError(f"{folder / 'samples.json'} is of another schema; delete the folder's samples.*")
            return cls(**values)
        except (AttributeError, KeyError, TypeError) as error:
            raise UserError(f"{folder / 'samples.json'} is not a manifest of samples ({error}); delete it") from None


def decode_rows(data: bytes, length: int) -> np.ndarray:
    """(rows, length) int32 of packed token ids. Raises ``ValueError`` and ``lzma.LZMAError`` for damaged data."""
    return unpack(data).reshape(-1, length).astype(np.int32)


def settings_of(config: SampleConfig, window: int) -> dict[str, Any]:
    """Settings that decide which text is written, but for its length and the model."""
    values = dataclasses.asdict(config)
    values.pop("tokens")
    values["length"] = config.length or window
    values["prompts"] = sha256_file(config.prompts) if config.prompts and Path(config.prompts).is_file() else None
    if config.prompts and values["prompts"] is None:
        raise UserError(f"text.sample.prompts: there is no text file {config.prompts}")
    return values


def tokens_needed(config: SampleConfig, budgets: Sequence[tuple[str, int | None]], on_gpu: bool) -> tuple[int, int]:
    """How many tokens to sample, and how many every set would need to hold its budget of ``collect.*_tokens``."""
    if config.tokens is not None:
        return config.tokens, config.tokens
    most = TOKENS_ON_GPU if on_gpu else TOKENS_ON_CPU
    needs = [most if budget is None else -(-budget * len(CYCLE) // CYCLE.count(name)) for name, budget in budgets]
    return min(most, max(needs)), max(needs)


def is_cached(source: TextSource, model: str, window: int, tokens: int) -> bool:
    """Whether the cache has so many tokens that ``model`` wrote with these settings. No weights are read, so a model
    is known by its name."""
    settings = settings_of(source.sample, window)
    for path in Path(source.cache).glob("self-*/samples.json"):
        with contextlib.suppress(UserError):  # damaged, and written anew when it is needed
            found = SampleManifest.load(path.parent)
            if found.model == model and found.settings == settings and found.tokens >= tokens:
                return True
    return False


def load_samples(
    source: TextSource,
    model: str,
    weight_hash: str,
    window: int,
    budgets: Sequence[tuple[str, int | None]],
    on_gpu: bool,
    tokenizer: Any,
    open_writer: Callable[[int, int], tuple[Write, str]],
) -> tuple[dict[str, list[Document]], TextManifest]:
    """The model's own text, sorted into sets: found beside the model or in the cache, or sampled now.

    Args:
        source: ``source`` is ``self``. ``sample`` says how, ``cache`` where.
        window: tokens of a recorded sequence, the length of a sample where ``sample.length`` is null.
        budgets: per collected set how many tokens of it will be recorded.
        on_gpu: whether the model runs on a GPU. Decides how much is sampled by default.
        open_writer: called as ``open_writer(batch_size, length)`` only if something must be sampled. Gives the
            function that samples, and its name for the manifest.

    Raises:
        UserError: damaged samples, a file of prompts that is missing or too small.
    """
    config = source.sample
    settings = settings_of(config, window)
    needed, asked = tokens_needed(config, budgets, on_gpu)
    folder = _find(Path(model), weight_hash, settings, config.tokens)
    if folder is not None:
        manifest = SampleManifest.load(folder)
        rows = _read(folder, manifest)
    else:
        if needed < asked:
            where = "a GPU" if on_gpu else "a CPU"
            logger.info("text: %d tokens on %s; --text.sample.tokens %d fills collect.*_tokens", needed, where, asked)
        key = hashlib.sha256(json.dumps([weight_hash, settings], sort_keys=True).encode()).hexdigest()[:16]
        folder = Path(source.cache) / f"self-{key}"
        with locked(folder / ".holders", f"another process is sampling into {folder}; waiting for it"):
            if _find(folder, weight_hash, settings, needed) is None:
                prompts = _prompts(config, tokenizer) or [[start_token(tokenizer)]]
                _sample(folder, model, weight_hash, config, settings, needed, prompts, open_writer)
            manifest = SampleManifest.load(folder)  # before another run may write more
            rows = _read(folder, manifest)
    if config.tokens is not None:  # more may be there than this run asks for
        rows = rows[: _rows_for(config.tokens, rows.shape[1])]
    sets = split_rows(rows, end_tokens(tokenizer))
    logger.info("text: %d tokens that the model wrote (%s)", rows.size, folder)
    return sets, TextManifest(
        source=SELF,
        revision=None,
        sha256=hashlib.sha256(rows.tobytes()).hexdigest(),
        documents={name: len(documents) for name, documents in sets.items()},
        skipped_paragraphs=0,
        versions=manifest.versions,
        file_sha256=source.file_sha256(),
        samples=settings | {"tokens": int(rows.size), "writer": manifest.writer},
    )


def split_rows(rows: np.ndarray, ends: Sequence[int] = (START_TOKEN,)) -> dict[str, list[Document]]:
    """Rows (R, length) of token ids as documents in their sets, dealt out row by row: most to train, some to calibrate
    and to choose.

    A document ends where the model wrote one of the tokens ``ends``. The documents of one row share its set, because
    each was written with those before it in view.
    """
    sets: dict[str, list[Document]] = {"train": [], "val": [], "calibration": []}
    for index, row in enumerate(rows):
        documents = sets[CYCLE[index % len(CYCLE)]]
        for number, part in enumerate(np.split(row, np.flatnonzero(np.isin(row, ends)))):
            ids = part[~np.isin(part, ends)]
            if len(ids):
                documents.append(Document(f"{index}.{number}", "", ids))
    empty = [name for name, documents in sets.items() if not documents]
    if empty:
        raise UserError(f"{len(rows)} sampled rows leave the set {empty[0]} empty; raise text.sample.tokens")
    return sets


def _rows_for(tokens: int, length: int) -> int:
    return -(-tokens // length)


def _find(folder: Path, weight_hash: str, settings: dict[str, Any], tokens: int | None) -> Path | None:
    """``folder`` if it holds samples of this model, written so, and at least ``tokens`` of them."""
    if not (folder / "samples.json").is_file() or not (folder / "samples.xz").is_file():
        return None
    manifest = SampleManifest.load(folder)
    if manifest.weight_hash != weight_hash:
        return None
    return folder if manifest.settings == settings and manifest.tokens >= (tokens or 0) else None


def _read(folder: Path, manifest: SampleManifest) -> np.ndarray:
    path = folder / "samples.xz"
    damaged = UserError(f"{path} is damaged; delete it, and the samples are written anew")
    if sha256_file(path) != manifest.sha256:
        raise damaged
    try:
        return decode_rows(path.read_bytes(), manifest.settings["length"])
    except (lzma.LZMAError, ValueError):
        raise damaged from None


def _prompts(config: SampleConfig, tokenizer: Any) -> Rows | None:
    if config.prompts is None:
        return None
    documents, _ = load_documents(TextSource(source=config.prompts))
    cut = (
        tokenizer(document.text, add_special_tokens=False, verbose=False)["input_ids"][: config.prompt_tokens]
        for document in documents
    )
    prompts = [[start_token(tokenizer), *ids] for ids in cut if len(ids) == config.prompt_tokens]
    if not prompts:
        raise UserError(f"text.sample.prompts: no document of {config.prompts} has {config.prompt_tokens} tokens")
    return prompts


def _sample(
    folder: Path,
    model: str,
    weight_hash: str,
    config: SampleConfig,
    settings: dict[str, Any],
    tokens: int,
    prompts: Rows,
    open_writer: Callable[[int, int], tuple[Write, str]],
) -> None:
    """Sample batch by batch into parts, then join them."""
    length = settings["length"]
    n_rows = _rows_for(tokens, length)
    starts = list(range(0, n_rows, config.batch_size))

    def batch(part: int) -> Rows:
        size = min(config.batch_size, n_rows - starts[part])
        return [prompts[(starts[part] + i) % len(prompts)] for i in range(size)]

    missing = [part for part in range(len(starts)) if not _is_whole(folder, part, len(batch(part)), length)]
    write, writer = open_writer(config.batch_size, length)
    if missing:
        logger.info("sampling %d tokens from the model", sum(len(batch(part)) for part in missing) * length)
    done = (len(starts) - len(missing)) * config.batch_size * length
    with Progress("sampling from the model", n_rows * length, "token", done) as progress:
        for part in missing:
            rows = np.array(write(batch(part), length, (config.seed * 1_000_003 + part) % MAX_SEED), np.int32)
            assert rows.shape[1] == length and (rows[:, 0] == prompts[0][0]).all()
            with replacing(folder / f"part_{part:04d}.xz") as temporary:
                temporary.write_bytes(pack(rows))
            progress.update(rows.size)
    parts = [folder / f"part_{part:04d}.xz" for part in range(len(starts))]
    rows = np.concatenate([decode_rows(path.read_bytes(), length) for path in parts])
    (folder / "samples.json").unlink(missing_ok=True)  # a kill in between leaves no manifest of other samples
    with replacing(folder / "samples.xz") as temporary:
        temporary.write_bytes(pack(rows))
    versions = {"torch": torch.__version__.split("+")[0]}
    digest = sha256_file(folder / "samples.xz")
    SampleManifest(model, weight_hash, settings, len(rows), int(rows.size), digest, writer, versions).save(folder)
    for path in folder.glob("part_*.xz"):
        path.unlink()


def _is_whole(folder: Path, part: int, rows: int, length: int) -> bool:
    """Whether a part of an interrupted run is there and holds as many rows as this run needs of it."""
    path = folder / f"part_{part:04d}.xz"
    return path.is_file() and len(decode_rows(path.read_bytes(), length)) == rows


def transformers_writer(model: Any, config: SampleConfig) -> Write:
    """Sampling by ``generate()`` of transformers: any device, any placement. The model forgets its own defaults."""
    drop_generation_defaults(model)

    def write(prompts: Rows, length: int, seed: int) -> Rows:
        device = model.get_input_embeddings().weight.device
        ids = torch.tensor(prompts, device=device)
        new = length - ids.shape[1]
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            written = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                temperature=config.temperature,
                top_p=config.top_p,
                top_k=0,
                eos_token_id=[],  # rows go on behind the last token of a text: there the next document begins
                max_new_tokens=new,
                pad_token_id=prompts[0][0],
            )
        return written.tolist()

    return write
