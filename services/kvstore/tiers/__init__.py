"""Colder and warmer places than the host arena, and what moves pages between them.

Cores (`slots`) are pure; the NVMe file and its threads (`nvme_file`, `disk_queue`) stand beside.
"""
