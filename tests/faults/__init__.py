"""Faults injected into real processes, the load they meet, and the judgement of what came of it.

Shared by the integration tests and by the benchmarks that print tables.
"""
