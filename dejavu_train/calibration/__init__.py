"""From predictors and rows to thresholds. Imports models, predictors, bundle and data. Never sparse, engine or
evaluation."""
