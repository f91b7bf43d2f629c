"""The ground that all rooms stand on: files, locks, signals, errors, progress. Imports nothing of the package above."""
