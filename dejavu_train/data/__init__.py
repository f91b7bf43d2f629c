"""From text to rows of activations. Imports models; never sparse, engine or evaluation."""
