"""Random small files, made of good ones by mutation. Two readers that share no code read each of them.

``python -m tests.files --seeds 0-499`` makes many. ``test_files.py`` some.
"""
