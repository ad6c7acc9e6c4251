"""Trains and judges the example adapters. `python -m examples.finetune.train NAME` is the way in."""
