"""From rows to predictors, and from text to a small OPT. Imports models, predictors, bundle, data and config;
never sparse, engine or evaluation."""
