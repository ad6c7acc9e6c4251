"""Measurements that ship with the engine."""
