"""Walks from a bundle to results: held-out text, quality rows, decode timing, a picture, generated text.

The configuration is one flat dataclass: defaults, then the YAML of ``--config``, then flags of the same names.
"""

import argparse
import dataclasses
import logging
import sys
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from tqdm import tqdm

from dejavu_train.bundle.artifact import Bundle
from dejavu_train.data.text import INSTALLED, SETS, TextSource
from dejavu_train.errors import UserError
from dejavu_train.evaluation import report
from dejavu_train.evaluation.baselines import SELECTIONS
from dejavu_train.evaluation.perplexity import EvalCorpus, EvalResult, EvalSetting, evaluate, passes
from dejavu_train.evaluation.picture import plot_curves
from dejavu_train.evaluation.texts import EvalText, load_text, name_texts, trained_text
from dejavu_train.evaluation.timing import (
    CPU,
    DENSE_CPU,
    DENSE_ENGINE,
    WARM_UP,
    Timing,
    time_cpu_engine,
    time_decoding,
    time_engine,
)
from dejavu_train.files import probe_folder, read_json
from dejavu_train.models.opt import load_opt, load_tokenizer, resolve_device
from dejavu_train.sparse.model import BACKENDS, SparseOPTForCausalLM

logger = logging.getLogger(__name__)


def _option(default: Any, text: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": text})


@dataclasses.dataclass(frozen=True)
class InferConfig:
    """What infer.py does. Densities are means over the layers; 1.0 is dense."""

    model: str = _option("checkpoints/opt-mini", "folder or hub id")
    revision: str | None = _option(None, "commit or tag of a hub model")
    bundle: str = _option("checkpoints/demo/bundle", "folder or hub id")
    output: str = _option("checkpoints/demo", "results.json and curve.png go here")
    text: tuple[str, ...] = _option(
        INSTALLED, "SOURCE or NAME=SOURCE: installed-..., a .txt/.jsonl file, a hub dataset; may be repeated"
    )
    text_config: str | None = _option(None, "of a hub dataset")
    text_revision: str | None = _option(None, "of a hub dataset")
    text_field: str = _option("text", "of a hub dataset or a JSONL line")
    text_cache: str = _option("checkpoints/text", "where installed texts are cached")
    text_set: str = _option("test", "which set of the text trained on, of installed-docs, of hub datasets")
    tokens: int | None = _option(8000, "how many to score of each text; null: all; 0: none")
    window: int = _option(512, "</s> and window - 1 new tokens")
    selections: tuple[str, ...] = _option(SELECTIONS, "rows at every density")
    densities: tuple[float, ...] = _option((0.1, 0.2), "of MLPs, all heads")
    curve_selections: tuple[str, ...] = _option(("predicted", "oracle", "random", "static"), "rows at those densities")
    curve_densities: tuple[float, ...] = _option((0.05, 0.4), "more MLP densities for the picture")
    yardstick_texts: str = _option(
        "first", "all: the same rows for all texts; first: later texts have predicted and oracle rows at densities only"
    )
    head_densities: tuple[float, ...] = _option((0.85,), "with every MLP density, predicted only")
    sparse_from: tuple[int, ...] = _option((0, 128), "later starts: predicted only")
    batch_tokens: int = _option(4096, "positions in one forward pass; fewer for large models")
    verify: str = _option("sampled", "full: hash every byte of the weights")
    timing: bool = _option(True, "time decoding")
    timing_backends: tuple[str, ...] = _option(
        (), "dense, gather, mask, triton, dense-engine, cpu, dense-cpu; none: dense and the engines of this device"
    )
    timing_mlp_density: float = _option(0.2, "densities while timing and generating")
    timing_head_density: float = _option(0.85, "the same for heads")
    batch: int = _option(1, "rows while timing")
    prompt: int = _option(32, "tokens of the prompt while timing")
    new_tokens: int = _option(64, "timed, and generated")
    generate: str | None = _option(None, "a prompt to continue")
    backend: str = _option("auto", "of --generate: auto, dense, mask, gather, triton, cpu, dense-engine, dense-cpu")
    device: str = _option("auto", "auto, cpu or cuda[:N]")
    device_map: str | None = _option(None, "auto: a model over several GPUs; needs accelerate")
    dtype: str = _option("float32", "float32, float16 or bfloat16")
    seed: int = _option(0, "of the random selection and of the order of documents")

    def check(self) -> None:
        """Raise :class:`UserError` for a value that cannot be meant."""
        for name in ("selections", "curve_selections"):
            unknown = [value for value in getattr(self, name) if value not in SELECTIONS]
            if unknown:
                raise UserError(f"--{name}: {unknown[0]} is no selection; known are {', '.join(SELECTIONS)}")
        for name in ("densities", "curve_densities", "head_densities", "timing_mlp_density", "timing_head_density"):
            value = getattr(self, name)
            for density in value if isinstance(value, tuple) else (value,):
                if not 0 < density <= 1:
                    raise UserError(f"--{name}: a density must lie above 0 and at most at 1, got {density}")
        for name, least in (("tokens", 0), ("window", 2), ("batch_tokens", 1), ("batch", 1), ("prompt", 1)):
            if getattr(self, name) is not None and getattr(self, name) < least:
                raise UserError(f"--{name} must be at least {least}, got {getattr(self, name)}")
        if self.new_tokens < 1 or any(start < 0 for start in self.sparse_from):
            raise UserError("--new_tokens must be at least 1, and --sparse_from not negative")
        if self.text_set not in SETS:
            raise UserError(f"--text_set must be one of {', '.join(SETS)}, got {self.text_set}")
        known = ("dense", *BACKENDS, DENSE_ENGINE, DENSE_CPU)
        if self.backend not in known:
            raise UserError(f"--backend must be one of {', '.join(known)}, got {self.backend}")
        timed = [name for name in known if name != "auto"]
        for backend in self.timing_backends:
            if backend not in timed:
                raise UserError(f"--timing_backends: {backend} is none of {', '.join(timed)}")
        if self.yardstick_texts not in ("first", "all"):
            raise UserError(f"--yardstick_texts must be first or all, got {self.yardstick_texts}")
        name_texts(self.text)
        if self.verify not in ("sampled", "full"):
            raise UserError(f"--verify must be sampled or full, got {self.verify}")

    def rows(self, first: bool = True) -> list[EvalSetting]:
        """The quality rows in the order of the table, the dense one first (it is the reference of all).

        Args:
            first: of the first text. Later ones take predicted and oracle rows at ``densities``, and the heads'
                densities at the largest of these, unless ``yardstick_texts`` is ``all``: each row is a pass.
        """
        rows = [EvalSetting("dense")]
        if not first and self.yardstick_texts == "first":
            few = [name for name in ("predicted", "oracle") if name in self.selections]
            rows += [EvalSetting(name, density) for density in sorted(self.densities) for name in few]
            if "predicted" in few and self.densities:
                rows += [EvalSetting("predicted", max(self.densities), heads) for heads in self.head_densities]
            return list(dict.fromkeys(rows))
        for density in sorted({*self.densities, *self.curve_densities}):
            names = self.selections if density in self.densities else self.curve_selections
            rows += [EvalSetting(name, density) for name in names if name != "dense"]
        if "predicted" in self.selections:
            rows += [EvalSetting("predicted", mlp, heads) for mlp in self.densities for heads in self.head_densities]
            later = [start for start in self.sparse_from if start]
            rows += [EvalSetting("predicted", density, 1.0, start) for start in later for density in self.densities]
        return list(dict.fromkeys(rows))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        raise UserError(f"{message}; python infer.py --help lists the options")


def read_config(argv: Sequence[str] | None) -> InferConfig:
    """Defaults, then the YAML file of ``--config``, then flags.

    Raises:
        UserError: an unknown key or flag, or a value of the wrong type.
    """
    parser = _Parser(description="Score, time and run a sparse OPT.", allow_abbrev=False)
    parser.add_argument("--config", help="YAML file with any of the options below as keys")
    fields = {field.name: field for field in dataclasses.fields(InferConfig)}
    for name, field in fields.items():
        bare = {"nargs": "?", "const": "true"} if field.type is bool else {}
        if name == "text":
            bare = {"action": "append"}
        parser.add_argument(f"--{name}", default=argparse.SUPPRESS, help=_help(field), **bare)  # type: ignore[arg-type]
    flags = vars(parser.parse_args(argv))
    path = flags.pop("config")
    values: dict[str, Any] = {}
    if path is not None:
        try:
            values = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
        except FileNotFoundError:
            raise UserError(f"there is no config file {path}") from None
        except (UnicodeDecodeError, yaml.YAMLError, IsADirectoryError) as error:
            raise UserError(f"the config file {path} is not readable YAML: {' '.join(str(error).split())}") from None
        if not isinstance(values, dict):
            raise UserError(f"the config file {path} must hold keys and values")
    unknown = sorted(set(values) - set(fields))
    if unknown:
        raise UserError(f"the config file {path} has the unknown key {unknown[0]}; known are {', '.join(fields)}")
    types_of = typing.get_type_hints(InferConfig)
    read = {name: _typed(name, value, types_of[name]) for name, value in values.items()}
    read |= {name: _typed(name, value, types_of[name]) for name, value in flags.items()}
    config = InferConfig(**read)
    config.check()
    return config


def _help(field: dataclasses.Field[Any]) -> str:
    default = ",".join(map(str, field.default)) if isinstance(field.default, tuple) else field.default
    return f"{field.metadata['help']} (default {default})".replace("%", "%%")


def _typed(name: str, value: Any, kind: Any) -> Any:
    """``value`` from YAML or a flag as the field's type; a list may be written with commas."""
    options = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if type(None) in options and (value is None or (value in ("null", "none", "") and str not in options)):
        return None
    kind = next(option for option in options if option is not type(None))
    wrong = UserError(f"--{name} must be {_named(kind)}, got {value}")
    if typing.get_origin(kind) is tuple:
        if name == "text":  # names of files may hold commas
            value = [value] if isinstance(value, str) else value
        items = value.split(",") if isinstance(value, str) else value if isinstance(value, (list, tuple)) else [value]
        return tuple(_typed(name, item, typing.get_args(kind)[0]) for item in items if item != "")
    if kind is bool:
        known = {"true": True, "false": False}
        if str(value).lower() not in known:
            raise wrong
        return known[str(value).lower()]
    if isinstance(value, bool) or isinstance(value, (list, dict)) or value is None:
        raise wrong
    if kind is int and isinstance(value, float):
        raise wrong
    try:
        return kind(value.strip() if isinstance(value, str) and kind is not str else value)
    except ValueError:
        raise wrong from None


def _named(kind: Any) -> str:
    if typing.get_origin(kind) is tuple:
        return f"a list, each item {_named(typing.get_args(kind)[0])}"
    return {int: "a whole number", float: "a number", bool: "true or false"}.get(kind, "text")


def main(argv: Sequence[str] | None = None) -> None:
    """Everything that infer.py does. Raises :class:`UserError` for what the user can mend."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    config = read_config(argv)
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(config.seed)
    _check_output(config)
    bundle = Bundle.from_pretrained(config.bundle)
    if config.verify == "full" and not bundle.weight_hash.startswith("full:"):
        raise UserError(
            f"--verify full: the bundle {config.bundle} was made with sampled hashes; train with verify full"
        )
    bundle.check_model(config.model, config.revision)
    tokenizer = load_tokenizer(config.model, config.revision)
    device = resolve_device(config.device)
    _check_densities(config, bundle)
    texts = _load_texts(config, bundle, tokenizer)
    dense = load_opt(config.model, config.dtype, device, config.device_map, config.revision)
    if config.window - 1 > dense.config.max_position_embeddings:
        raise UserError(
            f"--window {config.window} exceeds the model's {dense.config.max_position_embeddings} positions"
        )
    prompt = None if config.generate is None else _prompt(config, dense, tokenizer)
    if config.timing:
        _check_room(config, dense, texts[0].held)
    shown = config.densities[0] if config.densities else None
    scored = _score(config, dense, bundle, texts) if config.tokens != 0 else []
    timings = _time(config, dense, bundle, texts[0].held) if config.timing else []
    if prompt is not None:  # last: the engine lays weights of the model out anew
        print(_generate(config, dense, bundle, tokenizer, prompt))
    found = report.results(config.model, config.bundle, scored, timings, shown, _bandwidth(timings))
    print(report.tables(found))
    report.write_results(found, config.output)
    written = [str(Path(config.output) / "results.json")]
    if scored:
        picture = Path(config.output) / "curve.png"
        if plot_curves(found, picture):
            written.append(str(picture))
        else:
            logger.info("no curve.png: matplotlib is not installed (pip install matplotlib)")
    logger.info("wrote %s", " and ".join(written))


def _check_output(config: InferConfig) -> None:
    """Refuse a folder with the results of another model or bundle, and a path that is no folder."""
    folder = Path(config.output)
    probe_folder(folder)
    if (folder / "results.json").is_file():
        other = read_json(folder / "results.json", "results.json of an earlier run")
        before = (other.get("model"), other.get("bundle")) if isinstance(other, dict) else None
        if before != (config.model, config.bundle):
            raise UserError(
                f"{config.output} holds the results of another run (model and bundle {before}); give another --output"
            )


def _check_densities(config: InferConfig, bundle: Bundle) -> None:
    """Let impossible densities fail before anything slow starts."""
    pairs = {(row.mlp_density, row.head_density) for row in config.rows()} if config.tokens != 0 else set()
    if config.timing:
        pairs.add((config.timing_mlp_density, config.timing_head_density))
    for pair in sorted(pairs):
        bundle.at(*pair)


def _load_texts(config: InferConfig, bundle: Bundle, tokenizer: Any) -> list[EvalText]:
    trained = trained_text(bundle, config.bundle)
    named = list(name_texts(config.text).items())
    tokens = config.tokens
    if tokens == 0:  # without scoring one window is enough: timing takes its prompt from it
        named, tokens = named[:1], config.window - 1
    options = (config.text_set, config.model, trained, tokenizer, config.window, tokens, config.seed)
    texts = []
    for name, source in named:
        asked = TextSource(
            source=source,
            config=config.text_config,
            revision=config.text_revision,
            field=config.text_field,
            cache=config.text_cache,
        )
        texts.append(load_text(name, asked, *options))
    return texts


def _score(
    config: InferConfig, dense: Any, bundle: Bundle, texts: Sequence[EvalText]
) -> list[tuple[EvalText, list[EvalResult]]]:
    asked = [config.rows(first=text is texts[0]) for text in texts]
    total = sum(text.held.tokens * passes(rows) for text, rows in zip(texts, asked, strict=True))
    scored = []
    with tqdm(total=total, unit="tok", unit_scale=True, disable=not sys.stderr.isatty()) as bar:
        for text, rows in zip(texts, asked, strict=True):
            bar.set_description(f"scoring {text.name}")
            qualities = evaluate(dense, bundle, text.held, rows, config.batch_tokens, config.seed, bar.update)
            scored.append((text, qualities))
            # What was scored is kept, whatever comes after.
            shown = config.densities[0] if config.densities else None
            report.write_results(report.results(config.model, config.bundle, scored, [], shown), config.output)
    return scored


def _moved(config: InferConfig, bundle: Bundle) -> Bundle:
    return bundle.at(config.timing_mlp_density, config.timing_head_density)


def _sparse(config: InferConfig, dense: Any, bundle: Bundle, backend: str) -> Any:
    if backend == "dense":
        return dense
    return SparseOPTForCausalLM.from_model(dense, _moved(config, bundle), backend, sparse_from="prompt")


def _prompt(config: InferConfig, dense: Any, tokenizer: Any) -> torch.Tensor:
    """(1, T) token ids of ``--generate``."""
    ids = torch.tensor([[2, *tokenizer(config.generate, add_special_tokens=False)["input_ids"]]])
    room = dense.config.max_position_embeddings
    if ids.shape[1] >= room:
        raise UserError(f"--generate: the prompt has {ids.shape[1]} tokens, the model {room} positions")
    return ids


def _generate(config: InferConfig, dense: Any, bundle: Bundle, tokenizer: Any, ids: torch.Tensor) -> str:
    new_tokens = min(config.new_tokens, dense.config.max_position_embeddings - ids.shape[1])
    if config.backend in (DENSE_ENGINE, DENSE_CPU):
        made = _dense_engine(config.backend, dense).generate(ids.tolist(), new_tokens)
        return str(tokenizer.decode([*ids[0].tolist(), *made[0]], skip_special_tokens=True))
    model = _sparse(config, dense, bundle, config.backend)
    ids = ids.to(model.device)
    settings = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 1}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    return str(tokenizer.decode(out[0], skip_special_tokens=True))


def _bandwidth(timings: Sequence[Timing]) -> float | None:
    """GB/s at which this machine reads memory: the yardstick of engines for CPUs, where one was timed."""
    if not any(timing.backend in (CPU, DENSE_CPU) for timing in timings):
        return None
    from dejavu_train.engine.cpu.bandwidth import read_bandwidth  # imports numba

    return read_bandwidth()


def _dense_engine(backend: str, dense: Any) -> Any:
    if backend == DENSE_ENGINE:
        from dejavu_train.engine.decode import DecodeEngine  # imports triton

        return DecodeEngine(dense)
    from dejavu_train.engine.cpu import CpuEngine  # imports numba

    return CpuEngine(dense)


def _time(config: InferConfig, dense: Any, bundle: Bundle, held: EvalCorpus) -> list[Timing]:
    """Dense first: gather lays some weights of the shared model out anew."""
    longest = max(held.windows, key=len)
    prompt = torch.tensor([longest[: config.prompt]]).repeat(config.batch, 1)
    timings = []
    own: tuple[str, ...] = (DENSE_CPU, CPU) if dense.device.type == "cpu" else (DENSE_ENGINE, "triton")
    if config.device_map is not None:
        own = ()  # the engines run on one device
    for backend in sorted(config.timing_backends or ("dense", *own), key=lambda name: name != "dense"):
        logger.info("timing %s", backend)
        try:
            timings.append(_time_one(config, dense, bundle, backend, prompt))
        except UserError as error:
            if config.timing_backends:  # asked for by name
                raise
            logger.info("%s is not timed: %s", backend, error)
    return timings


def _time_one(config: InferConfig, dense: Any, bundle: Bundle, backend: str, prompt: torch.Tensor) -> Timing:
    if backend in (DENSE_ENGINE, "triton"):
        used = _moved(config, bundle) if backend == "triton" else None
        return time_engine(dense, used, backend, prompt, config.new_tokens)
    if backend in (DENSE_CPU, CPU):
        used = _moved(config, bundle) if backend == CPU else None
        return time_cpu_engine(dense, used, backend, prompt, config.new_tokens)
    return time_decoding(_sparse(config, dense, bundle, backend), backend, prompt, config.new_tokens)


def _check_room(config: InferConfig, dense: Any, held: EvalCorpus) -> None:
    """Raise :class:`UserError` unless the prompt and the new tokens of timing fit text and model."""
    longest, room = len(max(held.windows, key=len)), dense.config.max_position_embeddings
    if longest < config.prompt or config.prompt + config.new_tokens + WARM_UP > room:
        raise UserError(
            f"--prompt {config.prompt} and --new_tokens {config.new_tokens} do not fit: the longest window has"
            f" {longest} tokens, the model {room} positions"
        )
