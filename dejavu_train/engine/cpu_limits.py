"""What the CPU engine takes, known without numba."""

MAX_BATCH = 4
CHUNK = 64  # columns; a cache line of int8 codes
