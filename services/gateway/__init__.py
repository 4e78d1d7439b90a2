"""The gateway: the one door for applications. Never imports torch."""
