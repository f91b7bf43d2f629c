"""A call of ``generate()``: which engine writes it, or transformers' loop with ``mask`` or ``gather``."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dejavu_train.engine.draft import Draft, default_of
from dejavu_train.engine.request import check_loop
from dejavu_train.ground.errors import Unsupported, UserError
from dejavu_train.sparse.cache import SparseCache
from dejavu_train.sparse.call import Call, call_of, within
from dejavu_train.sparse.forward import check_cache
from dejavu_train.sparse.inputs import check_numbers, read_prompt, refuse_for_gather
from dejavu_train.sparse.masked import refuse_compiled
from dejavu_train.sparse.runtime import check_lossless


def generated(
    model: Any,
    dense_generate: Callable[..., Any],
    inputs: Tensor | None,
    generation_config: Any,
    kwargs: dict[str, Any],
    plain: Sequence[type],
) -> Any:
    """Run ``model.generate()`` of a sparse model.

    Args:
        dense_generate: the method of the dense class, for that model.
        inputs: (B, T) token ids, or None where ``kwargs`` has them by their name.
        kwargs: those of ``generate()``. What is ours alone is taken out.
        plain: classes whose methods the engines stand for, the most special first.

    Raises:
        UserError: as ``SparseCausalLM.generate`` says.
    """
    runtime, nested, start = model._runtime, call_of(model) is not None, model.sparse_from
    draft = Draft.taken_from(kwargs, default_of(model.bundle.metadata))
    if draft is not None:
        check_lossless(runtime)
    if kwargs.get("use_cache", True) is None:
        del kwargs["use_cache"]  # transformers would run all tokens again at every step, and keep them all
    config, _ = model._prepare_generation_config(generation_config, **kwargs)
    check_numbers(config)
    cache = kwargs.get("past_key_values")
    shown = read_prompt(inputs, kwargs, config, model)
    if config.cache_implementation == "paged":
        model.init_continuous_batching()
    if config.assistant_early_exit is not None:
        raise UserError("assistant_early_exit leaves layers out, and a bundle is for all; give assistant_model")
    if runtime.engines is not None:
        try:
            check_loop(model, plain)
            runtime.prepare(model)
            return runtime.engines.generate(model, inputs, generation_config, kwargs, start, draft)
        except UserError as refusal:
            if draft is not None and isinstance(refusal, Unsupported):  # no other backend verifies
                raise UserError(f"lossless decoding: {refusal.reason}") from None
            model._judge(refusal, runtime)
    mask = runtime.backend == "mask"
    caches = config.use_cache is not False or kwargs.get("inputs_embeds") is not None  # as transformers decides
    own = cache is None and not mask and caches
    if own:
        cache = kwargs["past_key_values"] = SparseCache.of(model)  # of `runtime`, as it is
    if mask:
        refuse_compiled(model)
    else:
        refuse_for_gather(shown, kwargs, config, model)
        check_cache(cache)
    # K and V of a row that is over are not computed, so nobody may be given that cache.
    drops_rows = own and not config.return_dict_in_generate and (config.num_beams or 1) == 1
    ending = config.eos_token_id if drops_rows else None
    call = Call(
        model,
        runtime,
        shown.sum(dim=1) if isinstance(start, str) else start,
        isinstance(start, str),
        shown.shape[1],
        None if ending is None else torch.as_tensor(ending).reshape(-1),
    )
    with runtime.turn(nested), within(call):
        return dense_generate(inputs, generation_config, **kwargs)
