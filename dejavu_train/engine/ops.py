"""The operations of a decoding step under one name each: the Triton kernels, or the same in plain torch."""

from dejavu_train.engine import reference
from dejavu_train.engine.reference import of_numbers
from dejavu_train.kernels.attention import attend_chunk, out_projection
from dejavu_train.kernels.dense import chunk_product, dense_batch, dense_rows, screened_head, unpack
from dejavu_train.kernels.lookahead import attend_pack, mlp_ahead, qkv_select
from dejavu_train.kernels.mlp import int4_fc2, live_down, pack
from dejavu_train.kernels.sample import sampling
from dejavu_train.kernels.stages import attend, hidden, mlp, mlp_batch, norm, predict, predict_rows, qkv, select
from dejavu_train.kernels.stages.mlp_owned import mlp_owned, mlp_owned_reference
from dejavu_train.kernels.verify import attend_slots, screened_slots, slot_products


class StepOps:
    """Operations of a step, as Triton kernels. Shapes, dtypes and errors are those of the kernel of the same name."""

    embed = staticmethod(sampling.embed)
    norm_heads = staticmethod(norm.norm_heads)
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
    layer_norm = staticmethod(norm.layer_norm)
    pack = staticmethod(pack.pack)
    listed_mlp = staticmethod(mlp.mlp)
    owned_mlp = staticmethod(mlp_owned)
    mlp_ahead = staticmethod(mlp_ahead.mlp_ahead)
    up_batch = staticmethod(mlp_batch.up_batch)
    down_batch = staticmethod(mlp_batch.down_batch)
    dense_wide = staticmethod(dense_rows.dense_wide)
    dense_rows = staticmethod(dense_rows.dense_rows)
    int4_fc2 = staticmethod(int4_fc2.int4_fc2)
    live_down = staticmethod(live_down.live_down)
    hidden_row = staticmethod(hidden.hidden_row)
    hidden_tokens = staticmethod(hidden.hidden_tokens)
    hidden_products = staticmethod(dense_batch.hidden_products)
    dense_add = staticmethod(dense_batch.dense_add)
    screened_head = staticmethod(screened_head.screened_head)
    advance = staticmethod(sampling.advance)
    attend_chunk = staticmethod(attend_chunk.attend_chunk)
    unpack = staticmethod(unpack.unpack)
    chunk_product = staticmethod(chunk_product.chunk_product)
    slot_qkv = staticmethod(slot_products.slot_qkv)
    attend_slots = staticmethod(attend_slots.attend_slots)
    slot_linear = staticmethod(slot_products.slot_linear)
    slot_hidden = staticmethod(slot_products.slot_hidden)
    screened_slots = staticmethod(screened_slots.screened_slots)


class TorchOps(StepOps):
    """The same in plain torch, called alike. 4-bit weights are written out as numbers first."""

    embed = staticmethod(of_numbers(sampling.embed_reference))
    norm_heads = staticmethod(of_numbers(norm.norm_heads_reference))
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
    owned_mlp = staticmethod(of_numbers(mlp_owned_reference))
    mlp_ahead = staticmethod(of_numbers(reference.mlp_ahead))
    up_batch = staticmethod(of_numbers(reference.up_batch))
    down_batch = staticmethod(of_numbers(reference.down_batch))
    dense_wide = staticmethod(of_numbers(dense_rows.dense_wide_reference))
    dense_rows = staticmethod(of_numbers(dense_rows.dense_rows_reference))
    int4_fc2 = staticmethod(of_numbers(int4_fc2.int4_fc2_reference))
    live_down = staticmethod(of_numbers(live_down.live_down_reference))
    hidden_row = staticmethod(reference.hidden_row)
    hidden_tokens = staticmethod(reference.hidden_tokens)
    hidden_products = staticmethod(reference.hidden_products)
    dense_add = staticmethod(of_numbers(reference.dense_add))
    screened_head = staticmethod(of_numbers(screened_head.screened_head_reference))
    advance = staticmethod(of_numbers(sampling.advance_reference))
    attend_chunk = staticmethod(attend_chunk.attend_chunk_reference)
    unpack = staticmethod(unpack.unpack_reference)
    chunk_product = staticmethod(chunk_product.chunk_product_reference)
    slot_qkv = staticmethod(of_numbers(slot_products.slot_qkv_reference))
    attend_slots = staticmethod(of_numbers(attend_slots.attend_slots_reference))
    slot_linear = staticmethod(of_numbers(slot_products.slot_linear_reference))
    slot_hidden = staticmethod(of_numbers(slot_products.slot_hidden_reference))
    screened_slots = staticmethod(of_numbers(screened_slots.screened_slots_reference))


def operations(kind: str) -> StepOps:
    """The step's operations: Triton kernels ("triton"), or the same in plain torch ("reference")."""
    return StepOps() if kind == "triton" else TorchOps()
