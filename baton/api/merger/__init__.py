"""Generated stubs of `baton.api.merger`: written by `make gen`, never edited."""
