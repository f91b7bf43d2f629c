"""From text to rows of activations. Imports models. Never sparse, engine or evaluation."""
