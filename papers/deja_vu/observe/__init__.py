"""What a dense model does on held-out text, and the paper's tables that need no tasks: ``python -m ...observe``."""
