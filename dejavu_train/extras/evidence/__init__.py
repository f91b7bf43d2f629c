"""From a model's name to the page that a sceptic wants: what it gains and loses, measured part by part."""
