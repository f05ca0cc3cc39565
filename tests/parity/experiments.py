"""Probes for single faults of the field; those for whole runs are in `tests.parity.probes`."""
