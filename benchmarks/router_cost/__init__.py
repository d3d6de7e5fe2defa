"""What a token and a request cost a router; run `python -m benchmarks.router_cost`."""
