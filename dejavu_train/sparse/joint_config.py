"""The config.json that ``SparseOPTForCausalLM.save_pretrained`` writes, as ``AutoConfig`` gives it."""

from transformers.models.auto.configuration_auto import AutoConfig
from transformers.models.opt.configuration_opt import OPTConfig

from dejavu_train.families.opt import SPARSE_OPT


class SparseOPTConfig(OPTConfig):
    """An OPT's configuration, but for its type."""

    model_type = SPARSE_OPT


AutoConfig.register(SPARSE_OPT, SparseOPTConfig, exist_ok=True)
