"""From a bundle to results. Imports sparse, engine and what they import, and data.text. Never training, shards,
lightning, wandb, h5py or (but to read a hub text) datasets."""
