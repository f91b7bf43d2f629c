"""Models that engines run beside an OPT: values of the fields of `ModelDims`. Loads no torch."""

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
VERIFIED: Runs = {name: values for name, values in RUNS.items() if name not in ("qk_norm", "logit_cap")}
"""Models that lossless decoding verifies on a GPU."""
