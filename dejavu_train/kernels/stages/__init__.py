"""One source a stage of a layer. What differs between models and formats is handed in."""
