"""The `baton` command: what people type. Services add their own commands by entry point."""
