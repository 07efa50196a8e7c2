"""What a run tells of itself: traces, metrics, and the diagnosis that names the bottleneck.

Loads no torch. Everything is exported by OTLP where an endpoint is configured, else written to files.
"""
