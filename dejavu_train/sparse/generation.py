"""A call of ``generate()``: which engine writes it, or transformers' loop with ``mask`` or ``gather``."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dejavu_train.engine.draft import Draft, default_of
from dejavu_train.errors import Unsupported, UserError
from dejavu_train.families import dims_of
from dejavu_train.sparse.cache import SparseCache
from dejavu_train.sparse.call import Call, call_of, within
from dejavu_train.sparse.forward import check_cache
from dejavu_train.sparse.inputs import check_prompt, prompt_lengths, refuse_for_gather
from dejavu_train.sparse.runtime import check_lossless


def generated(
    model: Any,
    dense_generate: Callable[..., Any],
    inputs: Tensor | None,
    generation_config: Any,
    kwargs: dict[str, Any],
) -> Any:
    """What ``model.generate()`` returns, of a sparse model.

    Args:
        dense_generate: the method of the dense class, for that model.
        inputs: (B, T) token ids, or None where ``kwargs`` has them by their name.
        kwargs: those of ``generate()``. What is ours alone is taken out.

    Raises:
        UserError: as ``SparseCausalLM.generate`` says.
    """
    runtime, nested, start = model._runtime, call_of(model) is not None, model.sparse_from
    draft = Draft.taken_from(kwargs, default_of(model.bundle.metadata))
    if draft is not None:
        check_lossless(runtime)
    settings = generation_config or model.generation_config

    def setting(name: str) -> Any:
        return kwargs.get(name, getattr(settings, name, None))

    cache = kwargs.get("past_key_values")
    limit = dims_of(model.config).max_positions
    check_prompt(inputs, kwargs, setting("pad_token_id"), model.get_input_embeddings().num_embeddings, limit)
    if setting("cache_implementation") == "paged":
        model.init_continuous_batching()
    if setting("assistant_early_exit") is not None:
        raise UserError("assistant_early_exit leaves layers out, and a bundle is for all; give assistant_model")
    if runtime.engines is not None:
        try:
            runtime.prepare(model)
            return runtime.engines.generate(model, inputs, generation_config, kwargs, start, draft)
        except UserError as refusal:
            if draft is not None and isinstance(refusal, Unsupported):  # no other backend verifies
                raise UserError(f"lossless decoding: {refusal.reason}") from None
            model._judge(refusal, runtime)
    mask = runtime.backend == "mask"
    if cache is None and not mask and setting("use_cache") is not False:
        cache = kwargs["past_key_values"] = SparseCache(model.config.num_hidden_layers)  # of `runtime`, as it is
    if isinstance(cache, SparseCache):
        cache.finished = None
    if not mask:
        refuse_for_gather(inputs, kwargs, setting, model.config)
        check_cache(cache)
    ending = setting("eos_token_id") if (setting("num_beams") or 1) == 1 else None
    if isinstance(start, str):
        start = prompt_lengths(inputs, kwargs, setting("pad_token_id"), cache)
    call = Call(model, runtime, start, None if ending is None else torch.as_tensor(ending).reshape(-1))
    with runtime.turn(nested), within(call):
        return dense_generate(inputs, generation_config, **kwargs)
