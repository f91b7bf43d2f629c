"""Random requests to `dejavu serve`, good ones and mutations of them, each judged by a reader of its own.

``python -m tests.asked --seeds 0-499``
"""
