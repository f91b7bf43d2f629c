"""All layers of a decoding step in one launch."""
