"""What stands beside the core, a room each. The core imports none of them. It reaches them through ``cli.registry``."""
