"""From rows to predictors, and from text to a small model. Imports models, predictors, bundle, data and config.
Never sparse, engine or evaluation."""
