"""From a model to the same model with its matrices in 4 bits: what it reads, calibrates, rounds and writes.

    model's tensors ──► foreign.py ──► layer.py ──► gptq.py ──► Int4Rows ──► folder.py ──► a model folder
    (source.py)         matrices, and   one decoder   codes of     (models/      a file for     (config.json with
    one by one          codes that can  layer on the  one matrix   int4.py)      each layer,    quantization_config)
                        stay as they    outputs of                               aside, then
    calibration text ──►are             those before                             renamed
    (run.py)                            (stream.py)

A layer is read, quantised and written before the next one. The text's hidden states lie on the disk. So a model is
never in memory as a whole, in any dtype. A run that was stopped goes on with the layer in which it was.

Rows stand in ``models/int4.py``. Units are rows, so that what is skipped takes its codes along. Other libraries put
groups along a matrix's inputs only, so the quantisers are our own. Loading is transformers' own work:
``models/int4_quantizer.py`` tells it how.
"""
