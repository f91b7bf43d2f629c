"""The keys of infer.py, and how it names texts. Readable without torch."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from dejavu_train.bundle.guard_config import Guard
from dejavu_train.data.text import INSTALLED
from dejavu_train.engine.cpu_limits import Stored
from dejavu_train.engine.draft import Draft
from dejavu_train.evaluation.shared_config import TextConfig
from dejavu_train.ground.errors import UserError
from dejavu_train.ground.ranges import COUNT, NUMBER, SEED, SHARE, Range, check_ranges

Selection = Literal["dense", "predicted", "oracle", "random", "static", "noncontextual"]
Timed = Literal[
    "dense", "mask", "gather", "triton", "cpu", "dense-engine", "dense-cpu", "dense-engine-read", "dense-cpu-read"
]  # fmt: skip
_FILE_SUFFIXES = (".txt", ".jsonl", ".gz", ".xz")


@dataclasses.dataclass(frozen=True)
class InferConfig(TextConfig):
    """Evaluation of a bundle as it was calibrated, and at other densities where they are asked for.

    A model without a bundle runs exactly: all units are computed, and rows of silent neurons are not read.

    Densities are means over the layers. 1.0 is dense. A target without predictors is dense whatever is asked.
    """

    EXACT = True
    EXAMPLES = (
        "python infer.py --model facebook/opt-125m               no predictors: exact, and what predictors could add",
        "python infer.py --config configs/infer/opt-mini.yaml                    the demo's results and report.html",
        "python infer.py --bundle checkpoints/mine/bundle --text heldout.txt     quality and speed of your bundle",
        'python infer.py --bundle checkpoints/mine/bundle --tokens 0 --timing false --generate "Once"    only text',
    )
    COMMON = (
        "bundle", "model", "output", "text", "tokens", "mlp_density", "timing", "generate", "new_tokens",
        "backend", "device", "dtype",
    )  # fmt: skip
    GROUPS = {
        "texts": (
            "Which texts are read",
            ("own_text", "text_config", "text_revision", "text_field", "text_cache", "window"),
        ),
        "quality": (
            "What is scored",
            ("selections", "head_density", "curve_mlp_density", "yardstick_texts", "sparse_from", "batch_tokens"),
        ),
        "speed": (
            "What is timed",
            ("timing_backends", "timing_mlp_density", "timing_head_density", "batch", "prompt"),
        ),
        "run": (
            "Of the model and this invocation",
            ("revision", "predictor", "verify", "seed", "device_map", "wandb"),
        ),
    }
    GONE = {
        "densities": "its name is --mlp_density",
        "head_densities": "its name is --head_density",
        "curve_densities": "its name is --curve_mlp_density",
        "curve_selections": "give --selections, whose rows but noncontextual stand at curve_mlp_density",
        "observe": "type python -m papers.deja_vu.observe --config papers/deja_vu/configs/observe.yaml",
        "generation": "type dejavu generation, with the same --output",
        "tasks": "type dejavu tasks, with --output FOLDER/tasks",
        "paper": "type python -m papers.deja_vu.tables --config papers/deja_vu/configs/tables.yaml",
    }

    predictor: dict[str, Any] | None = None
    """class_path (PACKAGE.CLASS, several with commas) of your own predictors in the bundle: docs/guides/extend.md."""
    text: str | tuple[str, ...] = INSTALLED
    """SOURCE or NAME=SOURCE, one or several: installed-..., a .txt or .jsonl file, a hub dataset."""
    own_text: dict[str, Any] | None = None
    """class_path and init_args of a text of your own, scored before the others: docs/guides/extend.md."""
    tokens: int | None = 8000
    """How many to score of each text. null: all. 0: none."""
    window: int = 512
    """Tokens of a sequence, the leading </s> included."""
    selections: tuple[Selection, ...] = get_args(Selection)
    """Rows of the bundle as calibrated, and at every mlp_density."""
    mlp_density: tuple[float, ...] = ()
    """Other densities of the MLPs, with all heads. One alone also writes the text of generate."""
    curve_mlp_density: tuple[float, ...] = ()
    """More densities of the MLPs, for the picture, on the first text, and without the yardstick that knows the token
    alone."""
    yardstick_texts: Literal["first", "all"] = "first"
    """all: the same rows for all texts. first: later texts have predicted and oracle rows, not of the curve."""
    head_density: tuple[float, ...] = ()
    """Other densities of the heads, with every mlp_density or the MLPs as calibrated, predicted only."""
    sparse_from: tuple[int, ...] = (0, 128)
    """From which position on the model is sparse. Starts above 0 are scored predicted only."""
    batch_tokens: int = 4096
    """Positions in one forward pass. Fewer for large models."""
    verify: Literal["sampled", "full"] = "sampled"
    """Name the model by a hash over samples of its weights, or over every byte."""
    timing: bool = True
    """Time decoding."""
    timing_backends: tuple[Timed, ...] = ()
    """Backends to time. None named: dense and the engines of this device."""
    timing_mlp_density: float | None = None
    """Density of the MLPs while timing and generating, of candidates where there is a second stage. null: as
    calibrated, and text of generate at the mlp_density, if it is one."""
    timing_head_density: float | None = None
    """Density of the heads while timing and generating. null: as with timing_mlp_density."""
    batch: int = 1
    """Rows while timing."""
    prompt: int = 32
    """Tokens of the prompt while timing."""
    new_tokens: int = 64
    """Tokens that are timed, and that are generated."""
    wandb: str | None = None
    """A project of Weights & Biases to log the tables and pictures to. WANDB_MODE=offline keeps them here."""
    generate: str | None = None
    """A prompt to continue."""
    backend: Literal["auto", "dense", "mask", "gather", "triton", "cpu", "dense-engine", "dense-cpu"] = "auto"
    """Backend that continues that prompt."""
    stored: Stored | None = None
    """Format of the weights in the CPU engine. null: 4 bits of a model that has them, else dtype."""
    guard: Guard = dataclasses.field(default_factory=lambda: Guard(every=0))
    """Dense tokens among those generated, which measure the selection and move thresholds."""
    lossless: bool | None = None
    """The dense model's text, drafted sparsely and verified, on an engine. null: as the bundle asks."""
    draft_length: int | None = None
    """Tokens of each draft, 0 to 7. null: chosen from what was accepted."""
    draft_weights: str | None = None
    """Weights of the draft: int8 on a CPU, int4 on a GPU, or a folder of the model in 4 bits. null: the model's own."""
    device_map: str | None = None
    """As in transformers (for instance auto) for a model over several GPUs. Needs accelerate."""

    def __post_init__(self) -> None:
        if isinstance(self.text, str):
            object.__setattr__(self, "text", (self.text,))
        super().__post_init__()

    def check(self) -> None:
        """Raise :class:`UserError` for a value that cannot be meant."""
        densities = ("mlp_density", "curve_mlp_density", "head_density", "timing_mlp_density", "timing_head_density")
        counts = ("batch_tokens", "batch", "prompt", "new_tokens")
        others = {"tokens": NUMBER, "window": Range(2, COUNT.most), "sparse_from": NUMBER, "seed": SEED}
        check_ranges(self, "--", dict.fromkeys(densities, SHARE) | dict.fromkeys(counts, COUNT) | others)
        if self.guard.every and self.generate is None:
            raise UserError("--guard.every watches generated text; give a prompt with --generate")
        if self.guard.every and self.backend not in ("auto", "gather", "triton"):
            raise UserError(f"--guard.every is for --backend auto, gather or triton, got {self.backend}")
        if self.lossless and self.generate is None:
            raise UserError("--lossless is for generated text; give a prompt with --generate")
        if self.lossless and self.backend not in ("auto", "cpu", "triton"):
            raise UserError(f"--lossless is for --backend auto, cpu or triton, got {self.backend}")
        if self.lossless and self.guard.every:
            raise UserError("--lossless has no guard, since acceptance measures the selection; leave --guard.every out")
        Draft.taken_from(self.drafting)
        name_texts(self.text)

    @property
    def drafting(self) -> dict[str, Any]:
        """Keywords about drafts for ``generate()``."""
        given = {name: getattr(self, name) for name in ("lossless", "draft_length", "draft_weights")}
        return {name: value for name, value in given.items() if value is not None}


def name_texts(texts: Sequence[str]) -> dict[str, str]:
    """Source by name, in the order asked for.

    Args:
        texts: each ``NAME=SOURCE`` or ``SOURCE``. Without a name a file is named by its stem, another source by itself.

    Raises:
        UserError: no text, an empty name or source, or a name given twice.

    >>> name_texts(["installed-code", "stories=prose/short.txt", "b.jsonl.gz"])
    {'installed-code': 'installed-code', 'stories': 'prose/short.txt', 'b': 'b.jsonl.gz'}
    """
    named: dict[str, str] = {}
    for text in texts:
        if "=" in text and not Path(text).is_file():
            name, source = (part.strip() for part in text.split("=", 1))
        else:
            name, source = _default_name(text), text
        if not name or not source:
            raise UserError(f"--text {text!r}: give SOURCE or NAME=SOURCE, neither of them empty")
        if name in named:
            raise UserError(f"--text: two texts are named {name}; tell them apart with NAME={source}")
        named[name] = source
    if not named:
        raise UserError("--text: give at least one text")
    return named


def _default_name(source: str) -> str:
    path = Path(source)
    if path.suffix.lower() not in _FILE_SUFFIXES:
        return path.stem if path.is_file() else source
    while path.suffix.lower() in _FILE_SUFFIXES:
        path = path.with_suffix("")
    return path.name
