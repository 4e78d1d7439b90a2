"""The client side of a node's arena: attach, map, replay, commit and append.

Owns what a worker needs of its kvstore. Never decides who may write: the store does, and a worker
that is told STALE_GENERATION stops. Import the submodules; this package re-exports nothing.
"""
