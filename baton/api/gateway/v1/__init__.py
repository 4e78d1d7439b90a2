"""Generated stubs of `baton.api.gateway.v1`: written by `make gen`, never edited."""
