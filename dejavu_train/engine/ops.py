"""The operations of a decoding step under one name each: the Triton kernels, or the same in plain torch."""

from typing import Protocol

from torch import Tensor

from dejavu_train.engine import reference
from dejavu_train.engine.reference import of_numbers
from dejavu_train.kernels.attention import out_projection
from dejavu_train.kernels.common import layer_norm
from dejavu_train.kernels.common.kv_cache import KvCache
from dejavu_train.kernels.common.layer_norm import LayerNormWeights
from dejavu_train.kernels.common.selection import PackedSelection, Selection
from dejavu_train.kernels.dense import dense_batch, dense_rows, dense_wide, screened_head
from dejavu_train.kernels.dense.screened_head import Chosen, ScreenedHead
from dejavu_train.kernels.formats.matrix import Linear, Matrix, MlpWeights
from dejavu_train.kernels.lookahead import attend_pack, mlp_ahead, qkv_select
from dejavu_train.kernels.lookahead.mlp_ahead import LateSite
from dejavu_train.kernels.mlp import int4_fc2, pack
from dejavu_train.kernels.sample import sampling
from dejavu_train.kernels.sample.sampling import TokenState
from dejavu_train.kernels.stages import attend, hidden, mlp, mlp_batch, predict, predict_rows, qkv, select
from dejavu_train.kernels.stages.attend import AttentionScratch
from dejavu_train.kernels.stages.mlp_batch import BatchActivations
from dejavu_train.kernels.stages.predictor import HeadPredictor, Predictor


class StepOps(Protocol):
    """What a step asks for. Shapes, dtypes and errors are those of the Triton kernel of the same name."""

    def embed(
        self, state: TokenState, embedding: Tensor, positions: Tensor, x: Tensor, /, pdl: bool = False
    ) -> None: ...

    def site_predict(
        self,
        x: Tensor,
        ln: LayerNormWeights,
        heads: HeadPredictor,
        position: Tensor,
        row_state: Tensor,
        attn_in: Tensor,
        mlp: Predictor | None = None,
        /,
        pdl: bool = False,
    ) -> None: ...

    def qkv(
        self,
        weights: Linear,
        cache: KvCache,
        selection: Selection,
        position: Tensor,
        q: Tensor,
        /,
        policy: str = "backfill",
        pdl: bool = False,
    ) -> None: ...

    def qkv_select(
        self,
        weights: Linear,
        cache: KvCache,
        selection: Selection,
        position: Tensor,
        q: Tensor,
        mlp: Predictor,
        row_state: Tensor,
        /,
        policy: str = "backfill",
        pdl: bool = False,
        late: LateSite | None = None,
    ) -> None: ...

    def attend_pack(
        self,
        q: Tensor,
        cache: KvCache,
        selection: Selection | None,
        position: Tensor,
        out: Tensor,
        scratch: AttentionScratch,
        neurons: tuple[Selection, PackedSelection],
        /,
        pdl: bool = False,
        mean: Tensor | None = None,
    ) -> None: ...

    def qkv_dense(
        self,
        x: Tensor,
        ln: LayerNormWeights,
        weights: Linear,
        position: Tensor,
        q: Tensor,
        cache: KvCache,
        /,
        pdl: bool = False,
    ) -> None: ...

    def flash_decode(
        self,
        q: Tensor,
        cache: KvCache,
        selection: Selection | None,
        position: Tensor,
        out: Tensor,
        scratch: AttentionScratch,
        /,
        pdl: bool = False,
        mean: Tensor | None = None,
    ) -> None: ...

    def project_heads(
        self,
        mixed: Tensor,
        weight: Matrix,
        bias: Tensor,
        residual: Tensor,
        selection: Selection | None,
        out: Tensor,
        /,
        pdl: bool = False,
    ) -> None: ...

    def predict(
        self,
        x: Tensor,
        ln: LayerNormWeights,
        predictor: Predictor,
        normalised_out: Tensor | None = None,
        /,
        pdl: bool = False,
    ) -> None: ...

    def predict_rows(self, x: Tensor, predictor: Predictor, /, pdl: bool = False) -> None: ...

    def select(self, predictor: Predictor, row_state: Tensor | None = None, /, *, pdl: bool = False) -> None: ...

    def layer_norm(self, x: Tensor, ln: LayerNormWeights, out: Tensor, /, pdl: bool = False) -> None: ...

    def pack(self, rows: Selection, out: PackedSelection, /, pdl: bool = False) -> None: ...

    def listed_mlp(
        self,
        x: Tensor,
        ln: LayerNormWeights | None,
        weights: MlpWeights,
        residual: Tensor,
        rows: PackedSelection,
        out: Tensor,
        /,
        partials: Tensor | None = None,
        early: str | None = None,
        pdl: bool = False,
    ) -> None: ...

    def mlp_ahead(
        self,
        x: Tensor,
        ln: LayerNormWeights,
        weights: MlpWeights,
        rows: PackedSelection,
        out: Tensor,
        ahead: LateSite,
        /,
        partials: Tensor | None = None,
        early: str | None = None,
        pdl: bool = False,
    ) -> None: ...

    def up_batch(
        self, x: Tensor, weights: MlpWeights, selection: Selection, out: BatchActivations, /, pdl: bool = False
    ) -> None: ...

    def down_batch(
        self, rows: BatchActivations, weights: MlpWeights, residual: Tensor, out: Tensor, /, pdl: bool = False
    ) -> None: ...

    def dense_rows(
        self,
        x: Tensor,
        ln: LayerNormWeights,
        weight: Matrix,
        bias: Tensor | None,
        activation: str,
        out: Tensor,
        /,
        pdl: bool = False,
    ) -> None: ...

    def dense_wide(
        self, y: Tensor, weight: Matrix, bias: Tensor, residual: Tensor, out: Tensor, /, pdl: bool = False
    ) -> None: ...

    def int4_fc2(
        self,
        h: Tensor,
        weight: Matrix,
        bias: Tensor,
        residual: Tensor,
        out: Tensor,
        /,
        partials: Tensor | None = None,
        pdl: bool = False,
        unit: float = 1.0,
    ) -> None: ...

    def hidden_row(
        self, x: Tensor, ln: LayerNormWeights, weights: MlpWeights, out: Tensor, /, pdl: bool = False
    ) -> None: ...

    def hidden_tokens(
        self, x: Tensor, weights: MlpWeights, listed: tuple[PackedSelection, Tensor] | None, /, pdl: bool = False
    ) -> Tensor: ...

    def hidden_products(self, x: Tensor, ln: LayerNormWeights, weights: MlpWeights, /, pdl: bool = False) -> Tensor: ...

    def dense_add(
        self,
        y: Tensor,
        weight: Matrix,
        bias: Tensor,
        residual: Tensor,
        out: Tensor,
        /,
        transposed: bool = False,
        pdl: bool = False,
        unit: float = 1.0,
    ) -> None: ...

    def screened_head(
        self, x: Tensor, head: ScreenedHead, position: Tensor, least: Tensor, stops: Tensor, /, pdl: bool = False
    ) -> None: ...

    def advance(
        self,
        logits: Tensor,
        state: TokenState,
        /,
        mode: str = "greedy",
        score: bool = False,
        pdl: bool = False,
        chosen: Chosen | None = None,
    ) -> None: ...


class TritonOps:
    """Every operation as Triton kernels."""

    embed = staticmethod(sampling.embed)
    qkv = staticmethod(qkv.qkv)
    site_predict = staticmethod(predict.site_predict)
    qkv_select = staticmethod(qkv_select.qkv_select)
    attend_pack = staticmethod(attend_pack.attend_pack)
    qkv_dense = staticmethod(dense_rows.qkv_dense)
    flash_decode = staticmethod(attend.flash_decode)
    project_heads = staticmethod(out_projection.project_heads)
    predict = staticmethod(predict.predict)
    predict_rows = staticmethod(predict_rows.predict_rows)
    select = staticmethod(select.select)
    layer_norm = staticmethod(layer_norm.layer_norm)
    pack = staticmethod(pack.pack)
    listed_mlp = staticmethod(mlp.mlp)
    mlp_ahead = staticmethod(mlp_ahead.mlp_ahead)
    up_batch = staticmethod(mlp_batch.up_batch)
    down_batch = staticmethod(mlp_batch.down_batch)
    dense_rows = staticmethod(dense_rows.dense_rows)
    dense_wide = staticmethod(dense_wide.dense_wide)
    int4_fc2 = staticmethod(int4_fc2.int4_fc2)
    hidden_row = staticmethod(hidden.hidden_row)
    hidden_tokens = staticmethod(hidden.hidden_tokens)
    hidden_products = staticmethod(dense_batch.hidden_products)
    dense_add = staticmethod(dense_batch.dense_add)
    screened_head = staticmethod(screened_head.screened_head)
    advance = staticmethod(sampling.advance)


class TorchOps:
    """Every operation in plain torch. 4-bit weights are written out as numbers first."""

    embed = staticmethod(of_numbers(sampling.embed_reference))
    qkv = staticmethod(of_numbers(qkv.qkv_reference))
    site_predict = staticmethod(of_numbers(predict.site_predict_reference))
    qkv_select = staticmethod(of_numbers(qkv_select.qkv_select_reference))
    attend_pack = staticmethod(of_numbers(reference.attend_pack))
    qkv_dense = staticmethod(of_numbers(dense_rows.qkv_dense_reference))
    flash_decode = staticmethod(of_numbers(attend.flash_decode_reference))
    project_heads = staticmethod(of_numbers(out_projection.project_heads_reference))
    predict = staticmethod(of_numbers(predict.predict_reference))
    predict_rows = staticmethod(of_numbers(predict_rows.predict_rows_reference))
    select = staticmethod(of_numbers(select.select_reference))
    layer_norm = staticmethod(of_numbers(reference.layer_norm))
    pack = staticmethod(of_numbers(reference.pack))
    listed_mlp = staticmethod(of_numbers(reference.listed_mlp))
    mlp_ahead = staticmethod(of_numbers(reference.mlp_ahead))
    up_batch = staticmethod(of_numbers(reference.up_batch))
    down_batch = staticmethod(of_numbers(reference.down_batch))
    dense_rows = staticmethod(of_numbers(dense_rows.dense_rows_reference))
    dense_wide = staticmethod(of_numbers(dense_wide.dense_wide_reference))
    int4_fc2 = staticmethod(of_numbers(int4_fc2.int4_fc2_reference))
    hidden_row = staticmethod(reference.hidden_row)
    hidden_tokens = staticmethod(reference.hidden_tokens)
    hidden_products = staticmethod(reference.hidden_products)
    dense_add = staticmethod(of_numbers(reference.dense_add))
    screened_head = staticmethod(of_numbers(screened_head.screened_head_reference))
    advance = staticmethod(of_numbers(sampling.advance_reference))


def operations(kind: str) -> StepOps:
    """The step's operations: Triton kernels ("triton"), or the same in plain torch ("reference")."""
    if kind == "triton":
        return TritonOps()
    return TorchOps()
