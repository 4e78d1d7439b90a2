"""Generated stubs of `baton.api.common`: written by `make gen`, never edited."""
