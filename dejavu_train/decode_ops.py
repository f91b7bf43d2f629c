"""The operations of a decoding step under one name each: the Triton kernels, or the same in plain torch."""

from types import SimpleNamespace

from dejavu_train import decode_reference
from kernels import (
    attend_pack,
    batched,
    cascade,
    dense_gemv,
    dense_wide,
    flash_decode,
    head_select,
    layer_norm,
    listed_batch,
    listed_mlp,
    out_projection,
    packed_rows,
    qkv,
    qkv_dense,
    qkv_select,
    sampling,
    scatter_gemv,
    select,
    site_predict,
)


def operations(kind: str) -> SimpleNamespace:
    """The step's operations: Triton kernels, or the same in plain torch."""
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
            predict_select=select.predict_select,
            listed_mlp=listed_mlp.listed_mlp,
            listed_batch=listed_batch.listed_batch,
            packed_batch=listed_batch.packed_batch,
            cascade=cascade.cascade,
            layer_norm=layer_norm.layer_norm,
            project_heads=out_projection.project_heads,
            scatter_gemv=scatter_gemv.scatter_gemv,
            pack=packed_rows.pack,
            packed_rows=packed_rows.packed_rows,
            dense_rows=dense_gemv.dense_rows,
            dense_hidden=batched.dense_hidden,
            dense_add=batched.dense_add,
            dense_wide=dense_wide.dense_wide,
            advance=sampling.advance,
        )
    return SimpleNamespace(
        embed=sampling.embed_reference,
        head_select=head_select.head_select_reference,
        qkv=qkv.qkv_reference,
        site_predict=site_predict.site_predict_reference,
        qkv_select=qkv_select.qkv_select_reference,
        qkv_dense=qkv_dense.qkv_dense_reference,
        flash_decode=flash_decode.flash_decode_reference,
        dense_rows=dense_gemv.dense_rows_reference,
        dense_hidden=None,
        dense_wide=dense_wide.dense_wide_reference,
        advance=sampling.advance_reference,
        predict_select=decode_reference.predict_select,
        gather_gemv=decode_reference.gather_gemv,
        cascade=decode_reference.cascade,
        layer_norm=decode_reference.layer_norm,
        project_heads=out_projection.project_heads_reference,
        scatter_gemv=decode_reference.scatter_gemv,
    )
