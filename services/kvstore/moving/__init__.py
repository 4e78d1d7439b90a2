"""Logs that change their kvstore: the old home's half, the new home's half, and the bytes between.

Cores (`departure`, `arrival`) are pure; the calls and the data plane stand beside them.
"""
