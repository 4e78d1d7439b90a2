"""What tests share: clocks moved by hand, seeded faults, tiny models. Never imported by a
service.
"""
