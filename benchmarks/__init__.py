"""Benchmarks behind the numbers in the docs. Each module measures, and renders its tables of the pages."""
