"""One forward pass of a sparse model: what it is given, and how ``mask`` and ``gather`` make it.

Letters: B batch rows, T new tokens, S tokens in a cache, K positions whose logits are requested, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from dejavu_train.bundle.selector import PredictorSelector
from dejavu_train.engine.request import check_mask
from dejavu_train.families import dims_of, family_of
from dejavu_train.families.base import logits_of
from dejavu_train.families.dims import Positions
from dejavu_train.ground.errors import Unsupported, UserError
from dejavu_train.models.finite import check_finite
from dejavu_train.sparse.cache import SparseCache
from dejavu_train.sparse.call import Call, call_of
from dejavu_train.sparse.inputs import (
    READ,
    SparseFrom,
    as_rows,
    check_ids,
    columns_of,
    has_gap,
    keep_columns,
    positions_of,
    refuse_outputs,
    sparse_positions,
    unread_keywords,
    visible_columns,
)
from dejavu_train.sparse.masked import masking
from dejavu_train.sparse.runtime import Runtime

Output: TypeAlias = tuple | CausalLMOutputWithPast


@dataclass
class ForwardArguments:
    """The arguments of a forward pass, by their names in transformers. ``rest``: its other keywords.

    Raises:
        UserError: both or none of ids and embeddings, ids that are no rows of tokens, a cache that is
            none, or ``torch.export``.
    """

    input_ids: Tensor | None
    attention_mask: Tensor | None
    past_key_values: Cache | None
    inputs_embeds: Tensor | None
    position_ids: Tensor | None
    labels: Tensor | None
    use_cache: bool | None
    logits_to_keep: int | Tensor
    rest: dict[str, Any]

    def __post_init__(self) -> None:
        if torch.compiler.is_exporting():
            raise UserError(
                "torch.export keeps one graph for every input, and a sparse model's follows from what each token"
                " selects; export the dense model"
            )
        if (self.input_ids is None) == (self.inputs_embeds is None):
            raise UserError("give exactly one of input_ids and inputs_embeds")
        if self.input_ids is not None:
            self.input_ids = as_rows(self.input_ids)
        if self.past_key_values is not None and not isinstance(self.past_key_values, Cache):
            got = type(self.past_key_values).__name__
            raise UserError(f"past_key_values must be a Cache, got {got}; see model.new_cache()")

    @property
    def tokens(self) -> Tensor:
        """Ids (B, T), or embeddings (B, T, d)."""
        given = self.input_ids if self.inputs_embeds is None else self.inputs_embeds
        assert given is not None
        return given

    @property
    def past(self) -> int:
        """Tokens in the cache."""
        return 0 if self.past_key_values is None else self.past_key_values.get_seq_length()

    def positions(self, device: torch.device, limit: int) -> Tensor:
        """(B, T) int64, -1 for padding.

        Raises:
            UserError: as :func:`positions_of`, or one at or behind ``limit``.
        """
        shape = self.tokens.shape[:2]
        found = positions_of(shape, self.attention_mask, self.position_ids, self.past, device)
        may_exceed = self.position_ids is not None or self.past + shape[1] > limit  # padding has no position
        if may_exceed and (needed := int(found.max()) + 1) > limit:
            raise UserError(
                f"{needed} tokens do not fit the model's {limit} positions; shorten the prompt or max_new_tokens"
            )
        return found

    def check_labels(self, start: SparseFrom) -> None:
        """Raise :class:`UserError` for labels of a text that is dense everywhere: ``start`` is ``sparse_from``."""
        if self.labels is not None and isinstance(start, str) and not self.past:
            raise UserError(
                "sparse_from='prompt' takes all of a scored text for the prompt and leaves every position dense;"
                " set sparse_from to a position, 0 for all"
            )

    def shown(self, positions: Tensor) -> Tensor:
        """(B, K) bool: which of the requested positions are none of padding."""
        return keep_columns((positions >= 0)[..., None], self.logits_to_keep)[..., 0]


def through_mask(
    model: Any,
    dense: Callable[..., Output],
    runtime: Runtime,
    call: Call | None,
    given: ForwardArguments,
    positions: Tensor,
    sparse: Tensor,
) -> Output:
    """The forward pass of ``mask``.

    Args:
        dense: that of the dense model.
        call: of ``generate()`` that the pass belongs to.
        positions, sparse: (B, T).
    Raises:
        UserError: gradient checkpointing, or numbers that are not finite.
    """
    if model.training and torch.is_grad_enabled() and _checkpoints_gradients(model):
        raise UserError(
            "the backend mask takes units out during the forward pass alone, so gradient checkpointing, which"
            " repeats it during the backward pass, is not for it; call model.gradient_checkpointing_disable()"
        )
    finite: list[Tensor] = []
    arguments = {name: value for name, value in vars(given).items() if name != "rest"}
    with masking(model, runtime.selector, sparse, means=runtime.means, finite=finite, checked=call is not None):
        output = dense(**arguments, **given.rest)
    if not model.training:
        logits = output.logits if isinstance(output, CausalLMOutputWithPast) else output[given.labels is not None]
        check_finite(logits, given.shown(positions), lambda: finite, model.config.num_hidden_layers)
    return output


def find_fault(model: Any, dense: Callable[..., Any], runtime: Runtime, tokens: list[int]) -> None:
    """Raise :class:`UserError` by the name of the layer where numbers of a row of ``tokens`` cease to be finite."""
    finite: list[Tensor] = []
    ids = torch.tensor([tokens], device=model.device)
    staged = None if runtime.backend == "triton" else model  # it selects all candidates
    selector, means = PredictorSelector(runtime.bundle, model.device, staged), runtime.bundle.head_means(model.device)
    with torch.no_grad(), masking(model, selector, means=means, finite=finite):
        logits = dense(input_ids=ids, use_cache=False).logits
    check_finite(logits, torch.ones_like(ids, dtype=torch.bool), lambda: finite, model.config.num_hidden_layers)


def through_gather(
    model: Any, runtime: Runtime, call: Call | None, given: ForwardArguments, positions: Tensor, sparse: Tensor
) -> Output:
    """The forward pass of ``gather``, of which ``attention_mask`` (B, S + T) bool is given.

    Args:
        call: of ``generate()`` that the pass belongs to.
        positions, sparse: (B, T).
    Raises:
        UserError: another cache than a SparseCache, or numbers that are not finite.
    """
    check_cache(given.past_key_values)
    asked = model.config.use_cache if given.use_cache is None else given.use_cache
    kept = given.past_key_values is not None or asked
    cache: Any = given.past_key_values
    if cache is None:
        cache = SparseCache.of(model)
    live = _note_ended_rows(call, given.input_ids, cache)
    hidden = family_of(model).embed(model, given.tokens, positions)
    assert given.attention_mask is not None
    if given.position_ids is None and dims_of(model.config).positions == Positions.ROTARY:
        positions = columns_of(positions, given.past)  # transformers turns by these, padding within a row counted
    hidden = runtime.gather(model).forward(hidden, positions, cache, sparse, given.attention_mask, live)
    logits = logits_of(model, keep_columns(hidden, given.logits_to_keep))
    check_finite(logits, given.shown(positions), list, 0)
    if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in model.parameters()):
        logits = _RefuseGradient.apply(logits if logits.requires_grad else logits.detach().requires_grad_())
    return output_of(model, logits, given, cache if kept else None)


def output_of(model: Any, logits: Tensor, given: ForwardArguments, cache: Cache | None = None) -> Output:
    """Logits (B, K, V) as transformers gives them, with the loss where there are labels."""
    loss = None
    if given.labels is not None:
        rest = {name: value for name, value in given.rest.items() if name not in READ}
        loss = model.loss_function(logits=logits, labels=given.labels, vocab_size=model.config.vocab_size, **rest)
    output = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)
    return output.to_tuple() if given.rest.get("return_dict") is False else output


@torch.compiler.disable(reason="what runs follows from what each token selects; no graph knows that")
def forwarded(model: Any, dense_forward: Callable[..., Any], given: ForwardArguments, call: Call | None) -> Output:
    """Run ``model.forward()`` of a sparse model.

    Args:
        dense_forward: the method of the dense class, for that model.
        call: of ``generate()``, that the forward pass belongs to.

    Raises:
        UserError: as ``SparseCausalLM.forward`` says. Token ids outside the vocabulary, as in ``generate()``.
    """
    runtime = model._runtime if call is None else call.runtime
    start = model.sparse_from if call is None else call.start(given.past + given.tokens.shape[1])
    if call is None:  # generate() has looked at its own
        check_mask(given.attention_mask)
        if given.input_ids is not None:
            check_ids(given.input_ids, model)
        if isinstance(given.attention_mask, Tensor) and given.attention_mask.dim() < 3:  # others are transformers' own
            visible_columns(given.attention_mask, given.tokens.shape[:2], given.past, model.device)
    if runtime.backend != "mask":
        given.attention_mask = visible_columns(given.attention_mask, given.tokens.shape[:2], given.past, model.device)
    shape = dims_of(model.config)
    if shape.positions == Positions.ALIBI:
        given.position_ids = None  # transformers counts them off the mask, whatever is given
    positions = given.positions(model.device, shape.max_positions)
    given.check_labels(start)
    sparse = sparse_positions(start, positions, given.past)
    if runtime.backend == "mask":
        return through_mask(model, dense_forward, runtime, call, given, positions, sparse)
    refuse_outputs(given.rest, model.config)
    for name in unread_keywords(given.rest) if call is None else ():
        model._current.log(f"forward() without backend='mask' gives {name} to the loss alone")
    if runtime.engines is not None and call is None:
        try:
            return through_engine(model, runtime, given, start)
        except UserError as refusal:
            model._judge(refusal, runtime)
    with runtime.turn(nested=call_of(model) is not None), torch.autocast(model.device.type, enabled=False):
        return through_gather(model, runtime, call, given, positions, sparse)


def through_engine(model: Any, runtime: Runtime, given: ForwardArguments, start: SparseFrom) -> Output:
    """Every position of whole rows, scored by the steps of a decode engine.

    Raises:
        UserError: what the engine refuses.
    """
    runtime.prepare(model)
    refuse_on_engine(given)
    assert given.attention_mask is not None
    if dims_of(model.config).positions == Positions.ROTARY and has_gap(given.attention_mask):
        raise Unsupported("a forward pass with padding within a row is not for the decode engine")
    assert runtime.engines is not None
    logits = runtime.engines.logits(given.input_ids, given.attention_mask, start)
    return output_of(model, keep_columns(logits, given.logits_to_keep), given)


def refuse_on_engine(given: ForwardArguments) -> None:
    """Raise :class:`Unsupported` for what a forward pass through an engine cannot take or give."""
    from dejavu_train.engine.request import check_forward

    named = {name: getattr(given, name) for name in ("past_key_values", "inputs_embeds", "position_ids", "use_cache")}
    check_forward(**named, **{name: given.rest.get(name) for name in ("output_attentions", "output_hidden_states")})


def check_cache(cache: Cache | None) -> None:
    """Raise :class:`UserError` for a cache that is not of ``gather``."""
    if cache is not None and not isinstance(cache, SparseCache):
        raise UserError(
            f"the backend gather needs a SparseCache, got {type(cache).__name__};"
            " leave past_key_values out, make one with model.new_cache(), or use backend='mask'"
        )


def _note_ended_rows(call: Call | None, input_ids: Tensor | None, cache: SparseCache) -> Tensor | None:
    """Within ``generate``: (B,) bool, rows that go on. An ended row leaves the union, its outputs are not used."""
    ending = None if call is None else call.ending_tokens
    if call is None or ending is None or input_ids is None or input_ids.shape[1] != 1:
        return None
    if cache.get_seq_length() < call.columns:  # a prompt ends nothing
        return None
    ended = torch.isin(input_ids[:, 0], ending.to(input_ids.device))
    cache.finished = ended if cache.finished is None else cache.finished | ended
    return ~cache.finished


def _checkpoints_gradients(model: torch.nn.Module) -> bool:
    """As transformers' property, whose name changes between its versions."""
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


class _RefuseGradient(torch.autograd.Function):
    """The same values. A backward pass is refused: ``gather`` would give the head a gradient and no layer below it."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise UserError("the backend gather gives no gradients; use backend='mask', or the dense model")
