"""Random small files, made of good ones by mutation, each read by the package and by a reader that shares no code with it.

``python -m tests.files --seeds 0-499`` makes many. ``test_files.py`` some.
"""
