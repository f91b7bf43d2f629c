"""How matrices lie in memory: plain data types, of torch alone."""
