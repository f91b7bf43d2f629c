"""What each engine runs beside an OPT: values of the fields of `ModelDims`. Loads no torch."""

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
)
_ACTIVE = (*SILENT, *SMOOTH)

GPU: Runs = dict.fromkeys(_EVERYTHING) | {"activation": _ACTIVE}
CPU: Runs = dict.fromkeys((*_EVERYTHING, "post_norm", "embedding_dim")) | {"activation": _ACTIVE}
