"""The config.json that ``SparseCausalLM.save_pretrained`` writes, as ``AutoConfig`` gives it."""

from transformers.models.auto.configuration_auto import CONFIG_MAPPING, AutoConfig

from dejavu_train.families.base import SAVED_TOGETHER, families


def register_types() -> None:
    """Let ``AutoConfig`` know the type of models that are saved with a bundle, of every family that there is now.

    Its configuration is the dense model's, but for the type.
    """
    from dejavu_train.families import published_classes  # noqa: F401  lets AutoConfig know their types

    for kind in families():
        if SAVED_TOGETHER + kind not in CONFIG_MAPPING:
            dense = CONFIG_MAPPING[kind]
            own = {"model_type": SAVED_TOGETHER + kind, "__module__": __name__}
            AutoConfig.register(SAVED_TOGETHER + kind, type(f"Sparse{dense.__name__}", (dense,), own))
