"""Rooms beside the core. The core imports none of them. It reaches them through ``cli.registry``."""
