"""The kvstore service: the KV logs and arenas of its node."""
