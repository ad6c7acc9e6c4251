"""Punica's engine: what a worker process is made of, and the pure contracts it shares with the front end."""

__version__ = "0.1.0"
