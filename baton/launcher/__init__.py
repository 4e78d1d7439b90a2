"""Runs the five services as child processes of one command on one machine.

Owns the plan (which processes, with which flags and threads), their start, their supervision and
their end. Never serves a request and never imports a service: children are started by module name.
"""
