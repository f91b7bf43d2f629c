"""The sizes of benchmarks/one_model.py, and how long its stages should take on H100s, from committed rows.

Text, collecting, training and calibration are those of ``train.py --plan``, see dejavu_train/run/estimate.py. What is
assumed besides stands in ``ASSUMED``, and what was not measured before says so.
"""

import dataclasses
from collections.abc import Mapping

from benchmarks.rows import ROOT
from dejavu_train.data.samples import CYCLE
from dejavu_train.extras.hosts.forecast import stated
from dejavu_train.extras.hosts.hardware import known_hardware
from dejavu_train.families import ModelDims
from dejavu_train.run.command import parse_config
from dejavu_train.run.plan import stage_seconds
from dejavu_train.training.config import RunConfig

VOCABULARY = 8192
POSITIONS = 1024
GPUS = 4
GPU = "H100"
DENSITY, HEADS = 0.1, 0.85  # at which the bundle is calibrated
DRAFTED = 0.2  # of the neurons, with all heads: lossless drafts


@dataclasses.dataclass(frozen=True)
class Scale:
    """A model, and how much is done with it."""

    d_model: int
    n_layers: int
    n_heads: int
    d_ffn: int
    learning_rate: float
    micro_rows: int
    rank: int
    head_rank: int
    rows: int = 128  # sequences of a step
    context: int = 1024
    warmup_steps: int = 60
    own_tokens: int = 200_000  # that the model writes and that are recorded
    steps: int = 1000  # of each predictor
    text_tokens: int = 30_000  # of each text
    questions: int = 300  # of each task
    prompts: int = 16  # of lossless decoding
    new_tokens: int = 192
    prompt: int = 128
    pretrain_seconds: float = 540.0

    @property
    def shape(self) -> ModelDims:
        return ModelDims(self.d_model, self.d_ffn, self.n_layers, self.n_heads, VOCABULARY, POSITIONS)

    @property
    def parameters(self) -> int:
        """Of the layers."""
        return self.n_layers * self.shape.layer_weights


_SMALL = {
    "rows": 4, "context": 128, "warmup_steps": 4, "own_tokens": 16_000, "steps": 20, "text_tokens": 1500,
    "questions": 6, "prompts": 2, "new_tokens": 16, "prompt": 32, "pretrain_seconds": 40.0,
}  # fmt: skip
SCALES = {
    "tiny": Scale(128, 2, 4, 512, 3e-3, 2, 16, 4, **_SMALL),  # type: ignore[arg-type]
    "14m-try": Scale(384, 6, 12, 1536, 3e-3, 2, 64, 12, **_SMALL | {"own_tokens": 24_000}),  # type: ignore[arg-type]
    "14m": Scale(384, 6, 12, 1536, 3e-3, 32, 64, 12),
    "100m": Scale(768, 12, 12, 3072, 2e-3, 32, 128, 12),
    "350m": Scale(1024, 24, 16, 4096, 1.2e-3, 16, 128, 16),
    "1.3b": Scale(2048, 24, 32, 8192, 8e-4, 8, 128, 32),
}


@dataclasses.dataclass(frozen=True)
class Assumed:
    """What the forecast takes from elsewhere."""

    start: float = 45.0  # processes, unpacking, the first connection of four GPUs
    compile: float = 45.0  # one layer's graphs; 24 layers share them
    tflops_per_width: float = 90 / 384  # of a GPU while pretraining: OPT of 14M, models.jsonl, 901,000 tokens a second
    most_tflops: float = 300.0  # of the 787 that bf16 products reach, however wide: not measured
    muon_tflops: float = 400.0  # of its own products: not measured
    score_tflops: float = 120.0  # TF32 products while texts are scored: not measured
    masked: float = 2.0  # a sparse pass in passes of the dense model
    load: float = 25.0  # a process that imports, reads the model, and compiles kernels
    collect_gb_s: float = 0.92  # written, then read: 26.9 GB of a 2.7B shape took 58 s in all on an H200
    worker: float = 20.0  # until a worker trains its first predictor
    gptq_layer: float = 5.0  # of a 1.3B shape, by d_ffn cubed from there on: not measured
    ms_token: float = 2.0  # of a lossless token, all ways


ASSUMED = Assumed()


def flags_of(scale: Scale, model: str, output: str, cache: str, share: float, device: str) -> list[str]:
    """The flags of train.py. share: of the tokens, where a run is late."""
    on_gpu = device == "cuda"
    return [
        f"--config={ROOT / 'configs/base.yaml'}", f"--model={model}", f"--output={output}", f"--text.cache={cache}",
        f"--text.sample.tokens={int(share * scale.own_tokens)}", "--collect.window=512",
        "--collect.train_tokens=null", "--collect.val_tokens=null", "--collect.calibration_tokens=null",
        f"--collect.dtype={'float16' if on_gpu else 'float32'}", f"--mlp.rank={scale.rank}",
        f"--heads.rank={scale.head_rank}", f"--mlp.steps={scale.steps}", f"--heads.steps={scale.steps}",
        f"--calibrate.mlp_density={DENSITY}", f"--calibrate.head_density={HEADS}", "--trainer.logger=false",
        f"--trainer.accelerator={'gpu' if on_gpu else 'cpu'}", "--data.num_workers=0",
        *([] if on_gpu else ["--calibrate.sensitivity_tokens=512", "--calibrate.head_loss_tokens=512"]),
    ]  # fmt: skip


def pretraining_step(scale: Scale, gpus: int = GPUS) -> float:
    """Seconds of a step: forward and backward of a GPU's share, and Muon, which every GPU does whole."""
    tokens = scale.rows * scale.context / gpus
    attention = 12 * scale.n_layers * scale.d_model * scale.context / 2
    work = tokens * (6 * (scale.parameters + VOCABULARY * scale.d_model) + attention)
    d, n = scale.d_model, scale.d_ffn
    iteration = 4 * (6 * d**3) + 2 * (4 * d * d * n + 2 * d**3)  # of Newton-Schulz, q, k, v, out and both of the MLP
    muon = 5 * scale.n_layers * iteration
    rate = min(ASSUMED.most_tflops, ASSUMED.tflops_per_width * d)
    return work / rate / 1e12 + muon / ASSUMED.muon_tflops / 1e12


def forecast(scale: Scale, gpus: int = GPUS) -> dict[str, float]:
    """Seconds of each stage in turn."""
    config: RunConfig = parse_config(flags_of(scale, "unread", "unread", "unread", 1.0, "cuda"))
    estimate = stated(config, scale.shape, known_hardware()[GPU], 1e9 * ASSUMED.collect_gb_s)
    shares = {name: CYCLE.count(name) / len(CYCLE) for name in ("train", "val", "calibration")}
    rows = {name: round(share * scale.own_tokens) for name, share in shares.items()}
    found: Mapping[str, float] = stage_seconds(estimate, rows, scale.own_tokens)
    passes = 3 + 6 * ASSUMED.masked  # of a text: the reference, two weights, and three selections of either
    scored = passes * 2 * scale.parameters * scale.text_tokens / ASSUMED.score_tflops / 1e12
    answered = 20 * scale.questions / 300 * scale.parameters / 1.2e9  # of a task: some 50,000 tokens, eight times
    lossless = ASSUMED.load + scale.prompts * scale.new_tokens * 8 * ASSUMED.ms_token / 1000
    measures = 8 * scored + 8 * answered + 12 * ASSUMED.load + 4 * ASSUMED.load + 2 * lossless
    return {
        "start": ASSUMED.start,
        "pretrain": ASSUMED.compile + scale.pretrain_seconds + ASSUMED.load + 10 * scale.parameters / 1.2e9,
        "text": ASSUMED.load + found["text"],
        "collect": ASSUMED.load + found["collecting"],
        "predictors": ASSUMED.worker + found["training"] / gpus,
        "calibrate": ASSUMED.load + found["calibrating"],
        "gptq": max(0.0, _gptq(scale) - sum(found[name] for name in ("collecting", "calibrating")) - 60),
        "measure": measures / gpus,
    }


def _gptq(scale: Scale) -> float:
    """It runs beside collecting, training and calibration. What it takes longer is waited for."""
    return ASSUMED.load + scale.n_layers * ASSUMED.gptq_layer * (scale.d_ffn / 8192) ** 2


def describe() -> str:
    """The forecast of each scale in minutes, as Markdown."""
    from benchmarks.tables_format import markdown

    names = [name for name in SCALES if name not in ("tiny", "14m-try")]
    found = {name: forecast(SCALES[name]) for name in names}
    rows = [[stage, *(f"{found[name][stage] / 60:.1f}" for name in names)] for stage in found[names[0]]]
    rows.append(["all", *(f"{sum(found[name].values()) / 60:.1f}" for name in names)])
    steps = {name: SCALES[name].pretrain_seconds / pretraining_step(SCALES[name]) for name in names}
    tokens = [f"{steps[name] * SCALES[name].rows * SCALES[name].context / 1e6:,.0f}" for name in names]
    rows.append(["million tokens of pretraining", *tokens])
    return markdown(["minutes on four H100", *names], rows)
