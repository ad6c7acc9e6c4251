"""Measuring a server from outside: workloads, a load client, and the benchmarks of `punica bench`."""
