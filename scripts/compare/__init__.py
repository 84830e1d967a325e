"""What parity.py and bench.py are made of: adapters of other engines, the start of ranks, and one rank's work."""
