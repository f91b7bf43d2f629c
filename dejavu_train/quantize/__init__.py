"""From a model to the same model with its matrices in 4 bits: what it reads, calibrates, rounds and writes.

    model's tensors ──► foreign.py ──► layer.py ──► gptq.py ──► Int4Rows ──► folder.py ──► a model folder
    (source.py)         matrices, and   one decoder   codes of     (models/      a file for     (config.json with
    one by one          codes that can  layer on the  one matrix   int4.py)      each layer,    quantization_config)
                        stay as they    outputs of                               aside, then
    calibration text ──►are             those before                             renamed
    (run.py)                            (stream.py)

A layer is read from disk, quantised and written before the next one is read. The calibration text's hidden states lie
on the disk, two a token (``data/stream.py``). So a model is never in memory as a whole, in any dtype. What is needed at
once is one layer in fp32, a batch, and some copies of the second moments of neurons. A run that was stopped goes on
with the layer in which it was.

Which rows the six matrices are made of stands in ``models/int4.py``. Units of the sparse model are rows, so that what
is skipped takes its codes and scales with it. That is why the quantisers are our own. The libraries that quantise for
transformers (gptqmodel, llm-compressor with compressed-tensors, torchao) put groups along a matrix's inputs only. Here
the groups of the map out of the neurons lie along its outputs. A column's scales are chosen as GPTQ reaches it. Scales
may be negative. The output projection's group is a head. Their checkpoints are read, see ``foreign.py``.

Loading is transformers' own work: ``models/int4_quantizer.py`` tells it how.
"""
