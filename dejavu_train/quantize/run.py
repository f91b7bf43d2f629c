"""From a model, and text that calibrates it, to a folder with its matrices in 4 bits."""

import dataclasses
import datetime
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from dejavu_train.data.config import CollectConfig
from dejavu_train.data.samples import Write, load_samples, transformers_writer
from dejavu_train.data.stream import Stream
from dejavu_train.data.text import SELF, load_sets
from dejavu_train.data.windows import plan_windows
from dejavu_train.families import ModelDims, dims_of
from dejavu_train.ground.errors import UserError
from dejavu_train.ground.files import read_json, write_json
from dejavu_train.ground.machine import free_memory, peak_memory
from dejavu_train.ground.progress import Progress
from dejavu_train.models.config_values import INT4, quant_method, read_dims, read_values
from dejavu_train.models.int4 import row_layouts
from dejavu_train.models.int4_sizes import head_sizes
from dejavu_train.models.load import load_model, load_tokenizer, resolve_device, weight_hash
from dejavu_train.models.stored import HEAD, in_layer
from dejavu_train.quantize.config import CONSTANTS, LEAST_PER_INPUT, QuantizeConfig
from dejavu_train.quantize.folder import ModelFolder, folder_aside
from dejavu_train.quantize.foreign import MatrixReader
from dejavu_train.quantize.head import quantised_head
from dejavu_train.quantize.layer import MatrixErrors
from dejavu_train.quantize.source import StoredTensors
from dejavu_train.quantize.stream import Skeleton, embed, quantised_layers
from dejavu_train.version import package_version

logger = logging.getLogger(__name__)


def quantise(config: QuantizeConfig) -> list[dict[str, MatrixErrors]]:
    """Write the folder.

    Args:
        config: checked.
    Returns:
        by layer its matrices and their errors.
    Raises:
        UserError: the model or the text.
    """
    began = time.monotonic()
    values = read_values(config.model, config.revision)
    shape = dims_of(values, config.model)
    source = StoredTensors(config.model, config.revision)
    reader = MatrixReader(source, values)
    device = resolve_device(config.device)
    digest = weight_hash(config.model, revision=config.revision)
    text: dict[str, Any] = {}
    windows: list[np.ndarray] = []
    if config.gptq:
        windows, text = calibration_windows(config, shape, digest)
    layouts = row_layouts(values["model_type"], shape, config.model)
    head, skeleton = head_sizes(shape, config.lm_head, config.model), Skeleton(values, source, device)
    asked = {**dataclasses.asdict(config), "output": "", "device": str(device), "text": text}
    identity = [asked, digest, package_version(), torch.__version__]
    with folder_aside(config.output, identity) as folder, Progress("quantising", shape.n_layers, "layer") as progress:
        batches = embed(skeleton, windows, config.batch_size, folder.work / "stream", identity) if windows else []
        log = LayerLog(folder, batches[0].stream if batches else None)
        progress.update(len(log.errors))
        within = in_layer(values)
        kept = [name for name in source if not within.search(name) and (head is None or name != HEAD)]
        if not folder.nbytes:
            folder.add({source.stored_name(name): source[name] for name in kept})
        layers = quantised_layers(skeleton, reader, layouts, config, batches, len(log.errors))
        for prefix, others, made in layers:
            prefix = source.stored_name(prefix)
            tensors = {prefix + name: tensor for name, tensor in others.items()}
            for part, result in made.items():
                tensors |= {f"{prefix}{part}.weight": result.rows.words, f"{prefix}{part}.scales": result.rows.scales}
            folder.add(tensors)
            log.add({part: result.errors for part, result in made.items()})
            progress.update()
        results = log.errors
        head_errors: dict[str, MatrixErrors] = {}
        if head is not None:
            rows, head_errors["lm_head"] = quantised_head(skeleton, head, config, batches)
            folder.add({"lm_head.weight": rows.words, "lm_head.scales": rows.scales})
            values = {**values, "tie_word_embeddings": False}
        report: dict[str, Any] = {
            "quantizer": config.quantizer,
            "lm_head": config.lm_head,
            "made_of": {"model": config.model, "weight_hash": digest, "quant_method": quant_method(values)},
            "text": text,
            "settings": {"damp_mean": config.damp_mean, **CONSTANTS, "seed": config.seed},
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
            "minutes": round((time.monotonic() - began) / 60, 2),
            "peak_memory_gb": peaks_of(device),
            "versions": {"dejavu_train": package_version(), "torch": torch.__version__.split("+")[0]},
            "date": datetime.date.today().isoformat(),
        }
        config_values = {**values, "quantization_config": {"quant_method": INT4, "bits": 4, **report}}
        errors = [{part: dataclasses.asdict(found) for part, found in made.items()} for made in results]
        report["layers"] = errors
        report |= {f"{part}_errors": dataclasses.asdict(found) for part, found in head_errors.items()}
        folder.finish(config.model, config.revision, config_values, report)
    print(summary([*results, head_errors], config.output))
    return results


class LayerLog:
    """Errors of the layers that are done, of which a folder that was stopped has files.

    Attributes:
        errors: by layer those of its matrices.
    """

    def __init__(self, folder: ModelFolder, stream: Stream | None) -> None:
        self._path = folder.work / "layers.json"
        stored = read_json(self._path, "the errors of layers") if self._path.is_file() else []
        done = min(len(stored), max(0, folder.files() - 1), len(stored) if stream is None else stream.next)
        self.errors = [{part: MatrixErrors(**found) for part, found in made.items()} for made in stored[:done]]
        if done:
            folder.go_on(done + 1)
            logger.info("quantising: going on with layer %d", done)

    def add(self, errors: dict[str, MatrixErrors]) -> None:
        """Add errors of the layer whose file was written last."""
        self.errors.append(errors)
        write_json(self._path, [{part: dataclasses.asdict(e) for part, e in made.items()} for made in self.errors])


def calibration_windows(
    config: QuantizeConfig, shape: ModelDims, digest: str
) -> tuple[list[np.ndarray], dict[str, Any]]:
    """Token ids of the calibration text, and what names it.

    Raises:
        UserError: the text, or fewer than ten tokens for each input of a matrix.
    """
    tokenizer = load_tokenizer(config.model, config.revision)
    tokens = config.calibration_tokens(shape)
    if config.text.source == SELF:
        budgets = [("train", tokens)]
        on_gpu = resolve_device(config.device).type == "cuda"
        sets, manifest = load_samples(
            config.text, config.model, digest, config.window, budgets, on_gpu, tokenizer,
            lambda _rows, _length: open_writer(config),
        )  # fmt: skip
    else:
        sets, manifest = load_sets(config.text, config.model)
    planned = plan_windows(sets["train"], tokenizer, CollectConfig(window=config.window), tokens, config.seed)
    windows = [window.ids for window in planned]
    n_tokens = sum(map(len, windows))
    needed = LEAST_PER_INPUT * max(shape.d_model, shape.d_ffn)
    if n_tokens < needed:
        raise UserError(
            f"the text {config.text.key} has {n_tokens:,} tokens to calibrate with, gptq needs {needed:,}:"
            f" {LEAST_PER_INPUT} for each input of a matrix; give more text, or --quantizer rtn"
        )
    return windows, {"source": manifest.source, "sha256": manifest.sha256, "tokens": n_tokens, "window": config.window}


def open_writer(config: QuantizeConfig) -> tuple[Write, str]:
    """The model, loaded as a whole, as a function that writes text, and its name.

    Raises:
        UserError: its weights have no room on the device.
    """
    device, shape = resolve_device(config.device), read_dims(config.model, config.revision)
    on_gpu = device.type == "cuda"
    size, room = shape.weights * (2 if on_gpu else 4), torch.cuda.mem_get_info(device)[1] if on_gpu else free_memory()
    if room is not None and size > room:
        raise UserError(
            f"{config.model} writes its own text as a whole, with {size / 1e9:.1f} GB of weights, and {device} has room"
            f" for {room / 1e9:.1f} GB; give --text FILE or a data set"
        )
    model = load_model(config.model, shape.half_dtype if on_gpu else "float32", device, revision=config.revision)
    return transformers_writer(model, config.text.sample), "transformers"


def peaks_of(device: torch.device) -> Mapping[str, float]:
    """Peaks of the process in GB: main memory, and that of the GPU where one was used."""
    main = peak_memory()
    peaks = {} if main is None else {"main": main / 1e9}
    if device.type == "cuda":
        peaks["gpu"] = torch.cuda.max_memory_allocated(device) / 1e9
    return {name: round(value, 2) for name, value in peaks.items()}


def summary(results: Sequence[Mapping[str, MatrixErrors]], output: str) -> str:
    """A line for each kind of matrix: how many were taken over exactly, and the errors of the others, as means."""
    lines = [f"{output}: errors as ratios of squares, means over the layers"]
    for part in dict.fromkeys(part for made in results for part in made):
        errors = [made[part] for made in results if part in made]
        rounded = [result for result in errors if not result.exact]
        line = f"{part}: {len(errors) - len(rounded)} exact, {len(rounded)} rounded"
        if rounded:
            line += f", weights {np.mean([result.weight_error for result in rounded]):.2e}"
            outputs = [result.output_error for result in rounded if result.output_error is not None]
            line += f", outputs {np.mean(outputs):.2e}" if outputs else ""
        lines.append(line)
    return "\n".join(lines)
