"""What the engines run beside an OPT: values of the fields of `ModelDims`. Loads no torch."""

from dejavu_train.families.dims import SILENT, SMOOTH, Runs

_EVERYTHING = (
    "n_kv_heads",
    "norm",
    "positions",
    "gated",
    "rotary_share",
    "threshold",
    "embedding_norm",
    "qk_norm",
    "logit_cap",
    "post_norm",
    "embedding_dim",
)
RUNS: Runs = dict.fromkeys(_EVERYTHING) | {"activation": (*SILENT, *SMOOTH)}
