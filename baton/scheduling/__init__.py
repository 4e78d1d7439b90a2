"""Who goes first where something is short: what every scheduler of a worker shares. Pure."""
