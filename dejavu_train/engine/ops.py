"""The operations of a decoding step under one name each: the Triton kernels, or the same in plain torch."""

from types import SimpleNamespace

from dejavu_train.engine import reference as decode_reference
from kernels import sampling
from kernels.attention import flash_decode, head_select, out_projection, qkv
from kernels.common import layer_norm
from kernels.dense import dense_batch, dense_gemv, dense_wide, int4_batch, qkv_dense, screened_head
from kernels.lookahead import attend_pack, mlp_ahead, qkv_select, site_predict
from kernels.mlp import (
    cascade,
    cascade_batch,
    int4_fc2,
    int4_mlp,
    select,
    sparse_fc2,
    sparse_mlp,
    sparse_mlp_batch,
)


def operations(kind: str) -> SimpleNamespace:
    """The step's operations: Triton kernels, or the same in plain torch ("reference")."""
    if kind == "triton":
        return SimpleNamespace(
            embed=sampling.embed,
            head_select=head_select.head_select,
            qkv=qkv.qkv,
            site_predict=site_predict.site_predict,
            qkv_select=qkv_select.qkv_select,
            attend_pack=attend_pack.attend_pack,
            qkv_dense=qkv_dense.qkv_dense,
            flash_decode=flash_decode.flash_decode,
            project_heads=out_projection.project_heads,
            predict_select=select.predict_select,
            layer_norm=layer_norm.layer_norm,
            pack=sparse_fc2.pack,
            sparse_mlp=sparse_mlp.sparse_mlp,
            int4_mlp=int4_mlp.int4_mlp,
            mlp_ahead=mlp_ahead.mlp_ahead,
            cascade=cascade.cascade,
            sparse_fc2=sparse_fc2.sparse_fc2,
            cascade_test=cascade_batch.cascade_test,
            fc1_batch=sparse_mlp_batch.fc1_batch,
            fc2_batch=sparse_mlp_batch.fc2_batch,
            dense_rows=dense_gemv.dense_rows,
            dense_wide=dense_wide.dense_wide,
            int4_fc2=int4_fc2.int4_fc2,
            int4_listed=int4_batch.int4_listed,
            dense_hidden=dense_batch.dense_hidden,
            dense_add=dense_batch.dense_add,
            screened_head=screened_head.screened_head,
            advance=sampling.advance,
        )
    plain = SimpleNamespace(
        embed=sampling.embed_reference,
        head_select=head_select.head_select_reference,
        qkv=qkv.qkv_reference,
        site_predict=site_predict.site_predict_reference,
        qkv_select=qkv_select.qkv_select_reference,
        attend_pack=decode_reference.attend_pack,
        qkv_dense=qkv_dense.qkv_dense_reference,
        flash_decode=flash_decode.flash_decode_reference,
        project_heads=out_projection.project_heads_reference,
        predict_select=decode_reference.predict_select,
        layer_norm=decode_reference.layer_norm,
        pack=decode_reference.pack,
        sparse_mlp=decode_reference.sparse_mlp,
        int4_mlp=decode_reference.sparse_mlp,
        mlp_ahead=decode_reference.mlp_ahead,
        cascade=decode_reference.cascade,
        sparse_fc2=decode_reference.sparse_fc2,
        cascade_test=decode_reference.cascade_test,
        fc1_batch=decode_reference.fc1_batch,
        fc2_batch=decode_reference.fc2_batch,
        dense_rows=dense_gemv.dense_rows_reference,
        dense_wide=dense_wide.dense_wide_reference,
        int4_fc2=sparse_fc2.sparse_fc2_reference,
        int4_listed=decode_reference.int4_listed,
        dense_hidden=decode_reference.dense_hidden,
        dense_add=decode_reference.dense_add,
        screened_head=screened_head.screened_head_reference,
        advance=sampling.advance_reference,
    )
    return SimpleNamespace(**{name: decode_reference.of_numbers(each) for name, each in vars(plain).items()})
