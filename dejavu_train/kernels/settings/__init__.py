"""Launch settings as data: a JSON file for each GPU model, read by `kernels/common/settings.py`.

`python -m benchmarks.tune` writes one for the present GPU. Models without a file take `other.json`, and Triton's
interpreter takes `interpreter.json`. Files count programs per multiprocessor, so that other.json fits GPUs of any size.
"""
